"""A long journey: 4 processes, workers and agents killed at random moments, and 4 -> 2 -> 3 -> 1 -> 4 meanwhile.

`TEST_JOURNEY_S` says for how many seconds of faults (600 for the whole journey), `TEST_JOURNEY_SEED` which ones.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.harness import PATIENCE, Faulted, Place
from faults.test_row_15_joins import resized

DURATION_S = float(os.environ.get("TEST_JOURNEY_S", "60"))
SEED = int(os.environ.get("TEST_JOURNEY_SEED", "4"))
SIZES = (2, 3, 1, 4)
STRICT = ("--determinism", "strict")
#: A micro-batch takes so long, so that faults meet every part of a step, and the processes do not fight for the cores.
PACE = {"at": "backward", "count": 1, "do": "slow", "seconds": 0.25, "lasting": True}
#: Steps for each second of faults: more than can be made in it, so that the run never ends before its faults do.
STEPS_PER_S = 2.5
STEPS_PER_EPOCH = 12
KILL_EVERY_S = 12.0


@dataclass
class Journey:
    """What is done to the run, at random moments. done: (seconds since the beginning, what)."""

    run: Faulted
    random: random.Random
    done: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def go(self, seconds: float, num_resizes: int) -> None:
        """Kill somebody now and then for so long, until the run has also taken up its last change of size."""
        while self.seconds < seconds or len(self.run.events("resize")) < num_resizes:
            assert self.run.process.poll() is None, self.run.text()
            assert self.seconds < seconds + 60 * PATIENCE, f"the change of size was never made: {self.run.text()}"
            pause_s = self.random.expovariate(1 / KILL_EVERY_S)
            time.sleep(max(0.1, min(pause_s, seconds - self.seconds)))
            if self.seconds < seconds:
                self.kill()

    def kill(self) -> None:
        """A worker or the process that forked it: the agent, or where there is only one worker, the one with the imports."""
        workers = self.run.workers()
        if not workers:
            return  # between two attempts
        rank = self.random.choice(sorted(workers))
        what = self.random.choice(("worker", "worker", "agent"))
        try:
            self.run.kill(workers[rank] if what == "worker" else self.run.parent(workers[rank]))
        except (ProcessLookupError, psutil.NoSuchProcess):
            return  # it has ended since it was looked at
        self.done.append((round(self.seconds, 1), f"{what} of rank {rank} of {len(workers)}"))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_processes_die_join_and_leave_and_every_bit_is_that_of_the_undisturbed_run(
    place: Place, golden: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = math.ceil(DURATION_S * STEPS_PER_S / STEPS_PER_EPOCH)
    reference = golden(*STRICT, epochs=epochs)
    flags = (*STRICT, "--gpus", "4", "--max-restarts", "10")
    run = place.start("run", *flags, epochs=epochs, faults=[PACE])
    run.wait_step(2)
    journey = Journey(run, random.Random(SEED))
    for number, processes in enumerate(SIZES):
        journey.go(DURATION_S * (number + 1) / (len(SIZES) + 1), num_resizes=number)
        resized(place, run.name, processes)
    journey.go(DURATION_S, num_resizes=len(SIZES))
    assert run.end(seconds=60 + STEPS_PER_S * DURATION_S) == 0
    with capsys.disabled():
        print("\n" + told(run, journey))
    assert [(row["before"], row["after"]) for row in run.events("resize")] == [(4, 2), (2, 3), (3, 1), (1, 4)]
    assert journey.done and run.account()["failures"] >= 1
    assert max(recoveries(run)) < 25 * PATIENCE
    run.holds_to(reference)


def recoveries(run: Faulted) -> list[float]:
    """Seconds from finding a failure to the end of the first step after it, sorted."""
    return sorted(float(row["recovery_s"]) for row in run.events("recovered"))


def told(run: Faulted, journey: Journey) -> str:
    """The journey's figures, for a person."""
    account: dict[str, Any] = run.account()
    again = recoveries(run)
    rows = [
        f"kills: {len(journey.done)} in {DURATION_S:.0f} s (seed {SEED}): {journey.done}",
        f"failures {account['failures']}, resizes {account['resizes']}, steps made again {account['recomputed_steps']}",
        f"found after (mean) {account['mean_detection_s']} s",
        f"training again after: median {again[len(again) // 2]} s, longest {again[-1]} s",
        f"cold start {account['cold_start_s']} s",
        f"effective training time ratio {account['effective_training_time_ratio']} of {account['wall_s']} s",
    ]
    return "\n".join(rows)
