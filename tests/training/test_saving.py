from __future__ import annotations

import math

import pytest

from fleetune.training.saving import interval_s, mean_time_between_failures


def lost_share(interval: float, cost_s: float, between_failures_s: float) -> float:
    """Time spent on saving and on doing steps again, as a share of all: what the formula makes small."""
    return cost_s / interval + interval / 2 / between_failures_s


@pytest.mark.parametrize("cost_s, between_failures_s", [(0.05, 86400.0), (5.0, 86400.0), (20.0, 7 * 86400.0)])
def test_no_other_interval_loses_less(cost_s: float, between_failures_s: float):
    best = interval_s(cost_s, between_failures_s)
    least = lost_share(best, cost_s, between_failures_s)
    assert all(lost_share(best * factor, cost_s, between_failures_s) > least for factor in (0.5, 0.9, 1.1, 2.0))
    assert math.isclose(best, math.sqrt(2 * cost_s * between_failures_s))


def test_saving_never_takes_more_than_its_share_however_often_a_run_fails():
    assert interval_s(10.0, 60.0) == pytest.approx(10.0 / 0.02)


def test_what_a_run_has_seen_outweighs_the_assumption():
    assert mean_time_between_failures(0.0, 0) == 24 * 3600
    assert mean_time_between_failures(24 * 3600.0, 23) == pytest.approx(2 * 3600)
    assert mean_time_between_failures(30 * 24 * 3600.0, 0) > 24 * 3600 * 30
