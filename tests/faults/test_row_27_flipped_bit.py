"""Row 27: one bit of one replica's weights flips without a word. The comparison finds it and names the rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.poison import events_of
from faults.with_faults import fleetune_with
from journeys.journey import SMALL, fleetune, losses, write_rows


@pytest.mark.long
def test_a_flipped_bit_is_found_within_k_steps_named_and_undone(tmp_path: Path, tiny_llama: Path):
    write_rows(tmp_path / "rows.jsonl")
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", *SMALL, "--micro-batch-size", "1", "--gpus", "3"]
    words += ["--checkpoint-every", "4", "--check-replicas-every", "2"]
    flipped = fleetune_with([{"kind": "flip", "rank": 1, "step": 7}], *words, "--run", "flipped", cwd=tmp_path)
    assert flipped.returncode == 0, flipped.stderr
    (told,) = events_of(tmp_path / "flipped", "replica_differs")
    assert 7 <= told["step"] <= 8 and told["cause"].startswith("rank 1 (node 0) differs") and told["action"] == "rewind"
    assert events_of(tmp_path / "flipped", "rewind")[0]["to_step"] == 4
    assert fleetune_with([], *words, "--run", "golden", cwd=tmp_path).returncode == 0
    assert losses(tmp_path / "flipped") == losses(tmp_path / "golden")
    assert not events_of(tmp_path / "golden", "replica_differs")
    verified = fleetune("verify", "flipped", "--against", "golden", "--bitwise", cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout
