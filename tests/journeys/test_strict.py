"""Strict determinism, end to end: processes come and go, and no bit of any loss changes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from journeys.journey import SMALL, fleetune, losses, rows_of, start, wait_for_step, write_rows

STRICT = [*SMALL, "--epochs", "3", "--determinism", "strict", "--micro-batch-size", "1", "--lora-dropout", "0.1"]


@pytest.mark.long
def test_two_then_three_then_one_process_is_bitwise_one_process(tmp_path: Path, tiny_llama: Path):
    write_rows(tmp_path / "rows.jsonl")
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", *STRICT]
    golden = fleetune(*words, "--run", "golden", cwd=tmp_path)
    assert golden.returncode == 0, golden.stderr
    assert "threads: 1" in (tmp_path / "golden" / "run.yaml").read_text()
    for processes, step in ((2, 9), (3, 19)):
        process = start(*words, "--run", "moved", "--gpus", str(processes), "--resume", cwd=tmp_path)
        wait_for_step(tmp_path / "moved", step, process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=200)
        assert process.returncode == 75, said
    done = fleetune("train", "--run", "moved", "--gpus", "1", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sizes = [row["world_size"] for row in rows_of(tmp_path / "moved" / "events.jsonl") if "world_size" in row]
    assert sizes == [2, 3, 1]
    assert losses(tmp_path / "moved") == losses(tmp_path / "golden")
    weights = [(tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes() for run in ("golden", "moved")]
    assert weights[0] == weights[1]
    verified = fleetune("verify", "moved", "--against", "golden", "--bitwise", cwd=tmp_path)
    assert verified.returncode == 0 and "lost 0, repeated 0, losses bitwise" in verified.stdout
