"""Row 18: the disk fills up during a run. Training goes on, the old checkpoint stands, the warning says what is missing, and
when there is room again everything is written, the rows that had to wait too."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.poison import events_of
from faults.with_faults import fleetune_with
from journeys.journey import SMALL, fleetune, losses, write_rows


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 6 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here (it needs root): {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "processes"), [("background", 1), ("blocking", 1), ("background", 2)])
def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_no_step_and_no_row(
    tmp_path: Path, small_disk: Path, tiny_llama: Path, mode: str, processes: int
):
    write_rows(tmp_path / "rows.jsonl")
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", *SMALL, "--checkpoint-every", "2", "--save-mode", mode]
    words += ["--micro-batch-size", "1", "--gpus", str(processes)]
    faults = [{"kind": "fill_disk", "rank": 0, "folder": str(small_disk), "from_step": 3, "before_step": 8}]
    done = fleetune_with(faults, *words, "--run", str(small_disk / "run"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = small_disk / "run"
    failed = events_of(run, "save_failed")
    assert failed and all(row["step"] in (4, 6) for row in failed)
    assert "could not be saved, training goes on" in done.stderr
    assert all("the disk is full" in row["cause"] and "missing" in row["cause"] for row in failed)
    assert {2, 12} <= {row["step"] for row in events_of(run, "save")}
    assert not list((run / "checkpoints").glob("*.tmp-*")), "space was not given back"
    verified = fleetune("verify", str(run), cwd=tmp_path)
    assert verified.returncode == 0 and "lost 0, repeated 0, 12 steps" in verified.stdout, verified.stdout
    assert fleetune(*words, "--run", "golden", cwd=tmp_path).returncode == 0
    kept = shutil.copytree(run, tmp_path / "kept")
    assert losses(kept) == losses(tmp_path / "golden")
