"""Row 19: storage that breaks, is slow, is gone or must not be written: training goes on and says so at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place


@pytest.mark.long
@pytest.mark.parametrize("at", ["fsync", "rename"])
def test_an_input_output_error_in_a_save_is_told_and_the_next_save_is_made(
    place: Place, golden: Callable[..., Path], tmp_path: Path, at: str
) -> None:
    fault = {"at": at, "count": 4, "rank": 0, "do": "eio", "once": str(tmp_path / "once")}
    run = place.start("run", "--gpus", "2", faults=[fault])
    assert run.end() == 0
    assert (tmp_path / "once").exists()
    run.holds_to(golden("--gpus", "2"))
    assert not run.events("failure") or run.account()["recomputed_steps"] <= 4


@pytest.mark.long
def test_a_disk_that_stalls_delays_and_ends_nothing(place: Place, golden: Callable[..., Path], tmp_path: Path) -> None:
    fault = {"at": "fsync", "count": 9, "rank": 0, "do": "slow", "seconds": 25.0, "once": str(tmp_path / "once")}
    run = place.start("run", "--gpus", "2", faults=[fault])
    assert run.end() == 0
    assert (tmp_path / "once").exists()
    assert not run.events("failure") and not run.events("hang")
    run.holds_to(golden("--gpus", "2"))


@pytest.mark.long
def test_checkpoints_that_vanish_do_not_end_the_run(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "2")
    run.wait_step(9)
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    assert run.end() == 0
    run.holds_to(golden("--gpus", "2"))


@pytest.mark.long
def test_a_place_that_may_not_be_written_is_told_before_anything_begins(place: Place, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        target = Path("/proc/fleetune-run")  # root may write everywhere else
    else:
        target = tmp_path / "locked" / "run"
        target.parent.mkdir(mode=0o500)
    run = place.start("run", "--run", str(target))
    assert run.end() == 2
    assert str(target) in run.text() and "Traceback" not in run.text()
