"""Killed, stopped, resumed: nothing lost, nothing repeated, the same numbers to the last bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from journeys.journey import SMALL, fleetune, kill_everything, losses, rows_of, samples, start, wait_for_step, write_rows

#: Dropout is on: its masks, too, must not depend on where a run was interrupted.
SLOW = [*SMALL, "--epochs", "6", "--checkpoint-every", "4", "--lora-dropout", "0.1", "--micro-batch-size", "1"]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    write_rows(folder / "rows.jsonl")
    done = fleetune("train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "golden", *SLOW, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.claim(
    "X45",
    command="fleetune train --resume",
    seen="killed twice and resumed: losses bitwise those of the uninterrupted run",
)
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_twice_and_resumed_is_bitwise_the_uninterrupted_run(golden: Path, tiny_llama: Path, processes: int):
    name = f"killed-{processes}"
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", "--gpus", str(processes), *SLOW]
    reference = "golden"
    if processes > 1:
        reference = f"golden-{processes}"
        assert fleetune(*words, "--run", reference, cwd=golden).returncode == 0
    for step in (6, 27):  # in the first and in a later epoch
        process = start(*words, "--run", name, "--resume", cwd=golden)
        wait_for_step(golden / name, step, process)
        kill_everything(process)
    done = fleetune(*words, "--run", name, "--resume", cwd=golden)
    assert done.returncode == 0, done.stderr
    assert losses(golden / name) == losses(golden / reference)
    verified = fleetune("verify", name, "--against", reference, "--bitwise", cwd=golden)
    assert verified.returncode == 0, verified.stderr
    assert "lost 0, repeated 0, losses bitwise" in verified.stdout


@pytest.mark.claim(
    "H2",
    command="fleetune train --resume --gpus 2",
    seen="a resumed run with other processes sees the same samples in the same steps",
)
def test_another_number_of_processes_sees_the_same_samples_in_the_same_steps(golden: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "moved", *SLOW]
    process = start(*words, "--gpus", "2", cwd=golden)
    wait_for_step(golden / "moved", 9, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    done = fleetune(*words, "--gpus", "1", "--resume", cwd=golden)
    assert done.returncode == 0, done.stderr
    assert samples(golden / "moved") == samples(golden / "golden")
    verified = fleetune("verify", "moved", "--against", "golden", cwd=golden)
    assert verified.returncode == 0 and "lost 0, repeated 0" in verified.stdout
    mine, theirs = ([float.fromhex(loss) for loss in losses(golden / run)] for run in ("moved", "golden"))
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_a_signal_saves_the_step_and_exits_75(golden: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "stopped", *SLOW]
    process = start(*words, cwd=golden)
    wait_for_step(golden / "stopped", 5, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75 and "--resume" in said
    last = rows_of(golden / "stopped" / "ledger.jsonl")[-1]["step"]
    assert (golden / "stopped" / "checkpoints" / f"step-{last:06d}").is_dir()
    done = fleetune(*words, "--resume", cwd=golden)
    assert done.returncode == 0, done.stderr
    assert losses(golden / "stopped") == losses(golden / "golden")
    ledger = rows_of(golden / "stopped" / "ledger.jsonl")
    assert len(ledger) == len({row["step"] for row in ledger}), "a saved step was done again"


def test_what_would_make_it_another_run_is_refused_naming_both_values(golden: Path, tiny_llama: Path):
    changed = ["--learning-rate", "5e-3", "--seed", "7", "--lora-rank", "4"]
    done = fleetune(
        "train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "golden", *SLOW, *changed, "--resume", cwd=golden
    )
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("seed", "7", "lora", "rank", "8", "4"))


def test_a_finished_run_goes_on_for_more_epochs_and_still_verifies(golden: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "longer", *SMALL, "--global-batch-size", "5"]
    assert fleetune(*words, "--epochs", "1", cwd=golden).returncode == 0
    first = len(samples(golden / "longer"))
    assert fleetune("train", "--run", "longer", "--resume", "--epochs", "2", cwd=golden).returncode == 0
    assert len(samples(golden / "longer")) > first
    seen = [sample for step in samples(golden / "longer") for sample in step]
    assert len(seen) == 2 * 48 and len(set(seen)) == 48
    verified = fleetune("verify", "longer", cwd=golden)
    assert verified.returncode == 0, verified.stdout


def test_a_ledger_that_leaves_out_a_sample_does_not_verify(golden: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "forged", *SMALL]
    assert fleetune(*words, cwd=golden).returncode == 0
    ledger = golden / "forged" / "ledger.jsonl"
    rows = rows_of(ledger)
    rows[3]["samples"][0] = rows[4]["samples"][0]
    ledger.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    verified = fleetune("verify", "forged", cwd=golden)
    assert verified.returncode == 3 and "lost 1" in verified.stdout
