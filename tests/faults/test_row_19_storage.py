"""Row 19: storage that breaks, is slow, is gone or must not be written. Training never waits for it, and says what happened."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place
from faults.poison import events_of
from faults.with_faults import fleetune_with, start_with
from journeys.journey import SMALL, complete_rows, fleetune, kill_everything, losses, rows_of, write_rows

STALL_S = 20.0
WORDS = [*SMALL, "--data", "rows.jsonl", "--micro-batch-size", "1", "--lora-dropout", "0.1", "--save-mode", "background"]


@pytest.mark.long
@pytest.mark.parametrize("at", ["fsync", "rename"])
def test_an_input_output_error_in_a_save_is_told_and_the_next_save_is_made(
    place: Place, golden: Callable[..., Path], tmp_path: Path, at: str
) -> None:
    fault = {"at": at, "count": 4, "rank": 0, "do": "eio", "once": str(tmp_path / "once")}
    run = place.start("run", "--gpus", "2", faults=[fault])
    assert run.end() == 0
    assert (tmp_path / "once").exists()
    told = [*run.events("save_failed"), *run.events("failure")]
    assert any("Input/output error" in row["cause"] for row in told), told
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("row-19")
    write_rows(made / "rows.jsonl")
    return made


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_stalls_holds_up_no_step_and_a_kill_meanwhile_loses_nothing(folder: Path, tiny_llama: Path, processes: int):
    words = ["train", "--model", tiny_llama, *WORDS, "--gpus", str(processes), "--checkpoint-every", "2"]
    golden, slow, killed = (f"{name}-{processes}" for name in ("golden", "slow", "killed"))
    assert fleetune(*words, "--run", golden, cwd=folder).returncode == 0

    faults = [{"kind": "slow_disk", "seconds": STALL_S, "from_step": 4}]
    done = fleetune_with(faults, *words, "--run", slow, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert losses(folder / slow) == losses(folder / golden)
    saves = {row["step"]: row for row in events_of(folder / slow, "save")}
    assert saves[4]["seconds"] > STALL_S
    made = {row["step"]: row["time"] for row in rows_of(folder / slow / "metrics.jsonl") if "loss" in row}
    assert made[11] < saves[4]["time"] and made[11] - made[4] < STALL_S, "training waited for the disk"
    # Only the end of the run waits for it: what is left of the stall when all steps are made.
    assert saves[4]["stall_s"] < saves[4]["time"] - made[11] + 1
    assert [row["step"] for row in events_of(folder / slow, "save_late")][:1] == [6]

    process = start_with([{"kind": "slow_disk", "seconds": 600, "from_step": 4}], *words, "--run", killed, cwd=folder)
    metrics = folder / killed / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and any(row.get("step", 0) >= 8 for row in complete_rows(metrics))):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    unfinished = list((folder / killed / "checkpoints").glob("step-000004.tmp-*"))
    kill_everything(process)
    assert unfinished, "step 8 was made while step 4 was still being written"
    done = fleetune("train", "--run", killed, "--resume", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [row["from_step"] for row in events_of(folder / killed, "start") if "from_step" in row] == [0, 2]
    verified = fleetune("verify", killed, "--against", golden, "--bitwise", cwd=folder)
    assert verified.returncode == 0 and "lost 0, repeated 0, losses bitwise" in verified.stdout
    assert not list((folder / killed / "checkpoints").glob("*.tmp-*"))


@pytest.mark.long
def test_a_disk_that_fails_for_a_while_costs_a_checkpoint_and_no_step(folder: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, *WORDS, "--checkpoint-every", "2"]
    faults = [{"kind": "failing_disk", "from_step": 4, "before_step": 7}]
    done = fleetune_with(faults, *words, "--run", "failing", cwd=folder)
    assert done.returncode == 0, done.stderr
    failed = [row for row in events_of(folder / "failing", "save_failed")]
    assert failed and all("Input/output error" in row["cause"] and row["step"] in (4, 6) for row in failed)
    assert "could not be saved, training goes on" in done.stderr
    assert {row["step"] for row in events_of(folder / "failing", "save")} >= {2, 12}
    assert not list((folder / "failing" / "checkpoints").glob("*.tmp-*"))
