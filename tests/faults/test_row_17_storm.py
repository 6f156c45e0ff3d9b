"""Row 17: ten kills in a row, and a crash that comes back at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place


@pytest.mark.long
def test_ten_kills_of_a_run_that_gets_on_are_all_survived(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "2", epochs=10)
    for attempt in range(10):
        run.wait_step(5 + 10 * attempt, attempt)
        workers = run.wait_workers(2, attempt=attempt)
        run.kill(workers[attempt % 2])
        run.wait(lambda done=attempt: len(run.events("failure")) == done + 1)
    assert run.end(300) == 0
    assert run.account()["failures"] == 10
    run.holds_to(golden("--gpus", "2", epochs=10))


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.long), 1])
def test_a_crash_at_the_same_step_is_given_up_with_its_cause_and_2(place: Place, processes: int) -> None:
    # Backward number 25 of an attempt: one process makes 4 a step, so it never comes past the next two checkpoints.
    fault = {"at": "backward", "count": 5, "rank": 0, "do": "raise"}
    run = place.start("run", "--gpus", str(processes), "--max-restarts", "2", faults=[fault])
    began = time.monotonic()
    assert run.end() == 2
    given_up = run.events("gave_up")[0]
    assert given_up["restarts"] == 2 and "the injected fault" in given_up["cause"]
    assert "gave up after 2 restarts without progress" in run.text() and "the injected fault" in run.text()
    assert [row["delay_s"] for row in run.events("restart")][-1] > 0, "no pause between restarts that do not help"
    assert time.monotonic() - began < 120
    run.leaves_nothing()
