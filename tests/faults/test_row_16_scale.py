"""Row 16: processes leave and come, 4 -> 2 -> 3 -> 1 -> 4, by request and by kill -9."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place
from faults.test_row_15_joins import resized
from journeys.journey import losses


@pytest.mark.long
def test_the_whole_trace_trains_what_the_golden_run_trains(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "4", epochs=10)
    step = 0
    for attempt, processes in enumerate((2, 3, 1, 4)):
        step += 12
        run.wait_step(step, attempt)
        resized(place, run.name, processes)
        run.wait(lambda done=attempt: len(run.events("resize")) == done + 1, what=f"for {processes} processes")
    workers = run.wait_workers(4, attempt=4)
    run.wait_step(60, 4)
    run.kill(workers[2])
    assert run.end(400) == 0
    assert [(row["before"], row["after"]) for row in run.events("resize")] == [(4, 2), (2, 3), (3, 1), (1, 4)]
    reference = golden("--gpus", "4", epochs=10)
    run.holds_to(reference, bitwise=False)
    mine, theirs = ([float.fromhex(loss) for loss in losses(path)] for path in (run.path, reference))
    assert mine == pytest.approx(theirs, rel=1e-3)
    rates = {row["step"]: row["learning_rate"] for row in run.rows("metrics.jsonl") if "loss" in row}
    wanted = {row["step"]: row["learning_rate"] for row in run.rows("metrics.jsonl") if "loss" in row and row["step"] in rates}
    assert rates == wanted


@pytest.mark.long
def test_a_device_that_fails_again_and_again_is_left_behind(place: Place, golden: Callable[..., Path]) -> None:
    bad = {"at": "backward", "count": 9, "rank": 2, "do": "kill"}
    run = place.start("run", "--gpus", "2:3", faults=[bad])
    assert run.end(240) == 0
    change = run.events("resize")[0]
    assert (change["before"], change["after"]) == (3, 2) and "rank 2" in change["cause"]
    run.holds_to(golden("--gpus", "3"), bitwise=False)
