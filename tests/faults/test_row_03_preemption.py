"""Row 3: a notice that the machine is taken away (SLURM's SIGTERM or SIGUSR1, a spot machine): saved, 75, nothing lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import PATIENCE, Place

#: Seconds between SLURM's notice and its SIGKILL by default.
NOTICE_S = 30.0


@pytest.mark.long
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, 2), (signal.SIGUSR1, 2), (signal.SIGTERM, 1)])
def test_a_notice_is_kept_and_the_resumed_run_loses_no_step(
    place: Place, golden: Callable[..., Path], number: signal.Signals, processes: int
) -> None:
    flags = ("--gpus", str(processes)) if processes > 1 else ()
    run = place.start("run", *flags)
    run.wait_step(9)
    began = time.monotonic()
    os.kill(run.process.pid, number)
    assert run.end(NOTICE_S) == 75
    assert time.monotonic() - began < NOTICE_S * PATIENCE
    assert "--resume" in run.text() and "saved after step" in run.text()
    last = max(row["step"] for row in run.rows())
    assert (run.path / "checkpoints" / f"step-{last:06d}").is_dir()
    run.leaves_nothing()
    run.begin("--resume")
    assert run.end() == 0
    assert run.account()["recomputed_steps"] == 0
    run.holds_to(golden(*flags))


@pytest.mark.long
def test_a_second_notice_and_one_in_the_middle_of_a_save_do_no_harm(
    place: Place, golden: Callable[..., Path], tmp_path: Path
) -> None:
    slow = {"at": "fsync", "count": 9, "rank": 0, "do": "slow", "seconds": 2.0, "once": str(tmp_path / "once")}
    run = place.start("run", "--gpus", "2", faults=[slow])
    run.wait((tmp_path / "once").exists)
    for _ in range(3):
        os.kill(run.process.pid, signal.SIGTERM)
        time.sleep(0.3)
    assert run.end(NOTICE_S) == 75
    run.faults = []
    run.begin("--resume")
    assert run.end() == 0
    run.holds_to(golden("--gpus", "2"))
