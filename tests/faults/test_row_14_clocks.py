"""Row 14: clocks that are a minute apart, and one that is set back an hour in the middle of a run, end and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.harness import PATIENCE, Place
from journeys.journey import rows_of

#: By process: the two workers, and the supervisor between them.
CLOCKS: list[dict[str, Any]] = [
    {"at": "clock", "rank": 0, "offset": 60.0},
    {"at": "clock", "rank": 1, "offset": -60.0, "jump": -3600.0, "after_s": 4.0},
    {"at": "clock", "rank": "supervisor", "offset": 0.0, "jump": -3600.0, "after_s": 8.0},
]


def learning_rates(run: Path) -> dict[int, float]:
    return {row["step"]: row["learning_rate"] for row in rows_of(run / "metrics.jsonl") if "loss" in row}


@pytest.mark.long
def test_no_rank_is_missed_and_no_number_changes(place: Place, golden: Callable[..., Path]) -> None:
    slow = {"at": "backward", "count": 1, "do": "slow", "seconds": 0.2, "lasting": True}
    run = place.start("run", "--gpus", "2", faults=[*CLOCKS, slow])
    assert run.end() == 0
    assert not run.events("failure") and not run.events("hang")
    times = [row["time"] for row in run.rows("metrics.jsonl") if "loss" in row]
    told = [row["time"] for row in run.rows("events.jsonl")]
    assert max(told) - min(told) > 3000, "no clock was set back"
    assert times == sorted(times)
    reference = golden("--gpus", "2")
    assert learning_rates(run.path) == learning_rates(reference)
    assert 0 < run.account()["effective_training_time_ratio"] <= 1
    run.holds_to(reference)


@pytest.mark.long
def test_a_killed_worker_is_found_as_soon_and_blamed_as_rightly(place: Place, golden: Callable[..., Path]) -> None:
    slow = {"at": "backward", "count": 1, "do": "slow", "seconds": 0.2, "lasting": True}
    run = place.start("run", "--gpus", "2", faults=[*CLOCKS, slow])
    workers = run.wait_workers(2)
    run.wait_step(24)
    run.kill(workers[1])
    assert run.end() == 0
    assert len(run.events("failure")) == 1
    assert run.failed("SIGKILL", rank=1)["detection_s"] < 1.0 * PATIENCE
    run.recovered_within(15)
    run.holds_to(golden("--gpus", "2"))
