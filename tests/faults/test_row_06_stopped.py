"""Row 6: a worker, or the agent, is stopped (SIGSTOP) and stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import PATIENCE, Place


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_is_found_and_named(place: Place, golden: Callable[..., Path], rank: int) -> None:
    run = place.start("run", "--gpus", "2")
    workers = run.wait_workers(2)
    run.wait_step(11)
    stopped_at = time.time()
    os.kill(workers[rank], signal.SIGSTOP)
    assert run.end() == 0
    failure = run.failed("no sign of life", "in step", rank=rank)
    hang = run.events("hang")[0]
    assert (hang["rank"], hang["node"], hang["phase"]) == (rank, 0, "step")
    assert 9 < failure["time"] - stopped_at < 10 + 5 * PATIENCE
    run.recovered_within(15)
    run.holds_to(golden("--gpus", "2"))


@pytest.mark.long
def test_a_stopped_agent_is_found(place: Place, golden: Callable[..., Path]) -> None:
    # Slow enough that the run does not end before the agent is missed.
    slow = {"at": "backward", "count": 1, "do": "slow", "seconds": 0.4, "lasting": True}
    run = place.start("run", "--gpus", "2", faults=[slow], epochs=6)
    workers = run.wait_workers(2)
    run.wait_step(5)
    os.kill(run.parent(workers[0]), signal.SIGSTOP)
    run.wait(lambda: run.events("failure"), 30)
    assert "agent" in run.events("failure")[0]["cause"]
    assert run.end(240) == 0
    run.holds_to(golden("--gpus", "2", epochs=6))


@pytest.mark.long
def test_300_steps_with_some_three_times_slower_raise_no_alarm(place: Place) -> None:
    slow = [{"at": "backward", "count": count, "do": "slow", "seconds": 0.3} for count in range(40, 1100, 60)]
    run = place.start("run", "--gpus", "2", "--checkpoint-every", "100", faults=slow, epochs=25)
    assert run.end(300) == 0
    assert len(run.rows()) == 300
    assert not run.events("failure") and not run.events("hang")
