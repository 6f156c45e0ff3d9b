"""Row 19: a disk that stalls, and one that gives errors for a while. Training never waits for it, and says what happened."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from faults.poison import events_of
from faults.with_faults import fleetune_with, start_with
from journeys.journey import SMALL, complete_rows, fleetune, kill_everything, losses, rows_of, write_rows

STALL_S = 20.0
WORDS = [*SMALL, "--data", "rows.jsonl", "--micro-batch-size", "1", "--lora-dropout", "0.1", "--save-mode", "background"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("row-19")
    write_rows(folder / "rows.jsonl")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_disk_that_stalls_holds_up_no_step_and_a_kill_meanwhile_loses_nothing(place: Path, tiny_llama: Path, processes: int):
    words = ["train", "--model", tiny_llama, *WORDS, "--gpus", str(processes), "--checkpoint-every", "2"]
    golden, slow, killed = (f"{name}-{processes}" for name in ("golden", "slow", "killed"))
    assert fleetune(*words, "--run", golden, cwd=place).returncode == 0

    faults = [{"kind": "slow_disk", "seconds": STALL_S, "from_step": 4}]
    done = fleetune_with(faults, *words, "--run", slow, cwd=place)
    assert done.returncode == 0, done.stderr
    assert losses(place / slow) == losses(place / golden)
    saves = {row["step"]: row for row in events_of(place / slow, "save")}
    assert saves[4]["seconds"] > STALL_S
    made = {row["step"]: row["time"] for row in rows_of(place / slow / "metrics.jsonl") if "loss" in row}
    assert made[11] < saves[4]["time"] and made[11] - made[4] < STALL_S, "training waited for the disk"
    # Only the end of the run waits for it: what is left of the stall when all steps are made.
    assert saves[4]["stall_s"] < saves[4]["time"] - made[11] + 1
    assert [row["step"] for row in events_of(place / slow, "save_late")][:1] == [6]

    process = start_with([{"kind": "slow_disk", "seconds": 600, "from_step": 4}], *words, "--run", killed, cwd=place)
    metrics = place / killed / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and any(row.get("step", 0) >= 8 for row in complete_rows(metrics))):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    unfinished = list((place / killed / "checkpoints").glob("step-000004.tmp-*"))
    kill_everything(process)
    assert unfinished, "step 8 was made while step 4 was still being written"
    done = fleetune("train", "--run", killed, "--resume", cwd=place)
    assert done.returncode == 0, done.stderr
    assert [row["from_step"] for row in events_of(place / killed, "start") if "from_step" in row] == [0, 2]
    verified = fleetune("verify", killed, "--against", golden, "--bitwise", cwd=place)
    assert verified.returncode == 0 and "lost 0, repeated 0, losses bitwise" in verified.stdout
    assert not list((place / killed / "checkpoints").glob("*.tmp-*"))


@pytest.mark.long
def test_a_disk_that_fails_for_a_while_costs_a_checkpoint_and_no_step(place: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, *WORDS, "--checkpoint-every", "2"]
    faults = [{"kind": "failing_disk", "from_step": 4, "before_step": 7}]
    done = fleetune_with(faults, *words, "--run", "failing", cwd=place)
    assert done.returncode == 0, done.stderr
    failed = [row for row in events_of(place / "failing", "save_failed")]
    assert failed and all("Input/output error" in row["cause"] and row["step"] in (4, 6) for row in failed)
    assert "could not be saved, training goes on" in done.stderr
    assert {row["step"] for row in events_of(place / "failing", "save")} >= {2, 12}
    assert not list((place / "failing" / "checkpoints").glob("*.tmp-*"))
