"""Row 5: kill -9 of the store in which ranks find each other: on one machine it is a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place


@pytest.mark.long
def test_the_run_does_not_notice(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "2")
    run.wait_step(13)
    run.kill(run.store())
    assert run.end() == 0
    assert not run.events("failure")
    run.holds_to(golden("--gpus", "2"))


@pytest.mark.long
def test_a_later_failure_finds_a_new_one(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "2")
    workers = run.wait_workers(2)
    run.wait_step(13)
    run.kill(run.store())
    run.wait_step(21)
    run.kill(workers[0])
    assert run.end() == 0
    assert run.account()["failures"] == 1
    assert run.events("recovered")[0]["recovery_s"] < 30 * 3
    run.holds_to(golden("--gpus", "2"))
