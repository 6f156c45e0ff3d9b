from __future__ import annotations

import pytest

from fleetune.training.schedules import Schedule


def test_the_rate_rises_to_the_peak_and_falls_to_the_final_share():
    schedule = Schedule(peak=1.0, num_steps=100, shape="cosine", warmup=0.1, final_share=0.1)
    rates = [schedule(step) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert max(rates) == rates[10] == 1.0
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[99] == pytest.approx(0.1)


def test_linear_falls_by_equal_amounts():
    schedule = Schedule(peak=2.0, num_steps=11, shape="linear")
    differences = {round(schedule(step) - schedule(step + 1), 9) for step in range(10)}
    assert differences == {0.2}
    assert schedule(10) == pytest.approx(0.0)


def test_constant_stays_at_the_peak():
    assert {Schedule(peak=3.0, num_steps=7, shape="constant")(step) for step in range(20)} == {3.0}


def test_after_the_horizon_the_rate_stays_at_its_end():
    schedule = Schedule(peak=1.0, num_steps=10, shape="cosine", final_share=0.2)
    assert schedule(10) == schedule(1000) == pytest.approx(0.2)


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_short_runs_have_a_positive_first_rate(shape, num_steps):
    schedule = Schedule(peak=1.0, num_steps=num_steps, shape=shape, warmup=0.03, final_share=0.1)
    assert all(0 < schedule(step) <= 1.0 for step in range(num_steps))


def test_a_warmup_in_steps_is_instead_of_its_share():
    in_steps = Schedule(peak=1.0, num_steps=10, shape="constant", warmup=0.9, warmup_steps=4)
    assert [round(in_steps(step), 6) for step in range(6)] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert Schedule(peak=1.0, num_steps=10, shape="constant", warmup=0.9, warmup_steps=0)(0) == 1.0
