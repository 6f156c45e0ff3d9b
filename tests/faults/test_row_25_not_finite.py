"""Row 25: a loss or gradient that is not finite, on one rank. All ranks agree before the update; the policy says what then."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from faults.poison import MARK as SPOILT
from faults.poison import events_of, ledger_of, spoil_embedding, steps_with, write_rows
from journeys.journey import SMALL, fleetune, kill_everything, losses, start, wait_for_step

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

#: The row (from 1) that meets the spoilt embedding, once an epoch.
ROW = 21
WORDS = [*SMALL, "--epochs", "2", "--gpus", "2", "--data", "rows.jsonl"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("row-25")
    spoil_embedding(tiny_llama, folder / "spoilt", math.nan)
    write_rows(folder / "rows.jsonl", 48, {ROW - 1: f"about {SPOILT} clips"})
    return folder


def test_a_step_with_nan_on_one_rank_is_left_out_by_all_and_named(place: Path):
    done = fleetune("train", "--model", "spoilt", "--run", "skip", *WORDS, cwd=place)
    assert done.returncode == 0, done.stderr
    bad = steps_with(place / "skip", ROW)
    assert len(bad) == 2
    ledger = ledger_of(place / "skip")
    assert [step for step, row in ledger.items() if row["applied"] is False] == bad
    assert all(math.isfinite(float.fromhex(row["loss_hex"])) for step, row in ledger.items() if step not in bad)
    told = events_of(place / "skip", "skipped")
    assert [row["step"] for row in told] == bad and all(row["action"] == "skip" for row in told)
    assert all(f"rows.jsonl:{ROW}" in row["cause"] and "rank " in row["cause"] for row in told)
    verified = fleetune("verify", "skip", cwd=place)
    assert verified.returncode == 0 and "lost 0, repeated 0" in verified.stdout
    assert "2 steps without an update" in verified.stdout


@pytest.mark.long
def test_stop_ends_the_run_at_once_for_the_person_to_mend(place: Path):
    done = fleetune("train", "--model", "spoilt", "--run", "stop", *WORDS, "--on-nonfinite", "stop", cwd=place)
    assert done.returncode == 2
    assert f"rows.jsonl:{ROW}" in done.stderr and "--on-nonfinite skip" in done.stderr and "Traceback" not in done.stderr
    assert [row["action"] for row in events_of(place / "stop", "nonfinite")] == ["stop"]
    ledger = ledger_of(place / "stop")
    assert all(row["applied"] for row in ledger.values())
    assert max(ledger) + 1 == events_of(place / "stop", "nonfinite")[0]["step"]


@pytest.mark.long
def test_rewind_leaves_the_steps_out_and_a_killed_run_decides_the_same_again(place: Path):
    more = ["--on-nonfinite", "rewind", "--skip-window", "2", "--checkpoint-every", "3"]
    done = fleetune("train", "--model", "spoilt", "--run", "back", *WORDS, *more, cwd=place)
    assert done.returncode == 0, done.stderr
    ledger, bad = ledger_of(place / "back"), steps_with(place / "back", ROW)
    rewinds = events_of(place / "back", "rewind")
    out = [step for step, row in ledger.items() if row["applied"] is False]
    assert set(bad) <= set(out) and all(row["left_out"][0] <= row["step"] == row["left_out"][1] for row in rewinds)
    assert out == sorted({step for row in rewinds for step in range(row["left_out"][0], row["left_out"][1] + 1)})
    assert all(f"rows.jsonl:{ROW}" in ledger[step]["left_out"] for step in out)
    assert fleetune("verify", "back", cwd=place).returncode == 0

    process = start("train", "--model", "spoilt", "--run", "killed", *WORDS, *more, cwd=place)
    wait_for_step(place / "killed", min(bad) + 1, process)
    kill_everything(process)
    done = fleetune("train", "--run", "killed", "--resume", cwd=place)
    assert done.returncode == 0, done.stderr
    assert losses(place / "killed") == losses(place / "back")
    compared = fleetune("verify", "killed", "--against", "back", "--bitwise", cwd=place)
    assert compared.returncode == 0 and "lost 0, repeated 0, losses bitwise" in compared.stdout
