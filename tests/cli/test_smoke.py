"""`fleetune train --smoke`: the whole way in short, and nothing that stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fleetune as package
from fleetune.spec.errors import UserError
from journeys.journey import fleetune, write_rows

WORDS = ["--data", "rows.jsonl", "--sequence-length", "128", "--micro-batch-size", "2", "--gradient-accumulation-steps", "8"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", 24)
    with open(tmp_path / "rows.jsonl", "a", encoding="utf-8") as file:  # the longest by far stand at the end
        for number in range(2):
            file.write(json.dumps({"question": f"Count to {number + 11}.", "answer": "one and " * 8}) + "\n")
    write_rows(tmp_path / "held.jsonl", 20, first=100)
    return tmp_path


@pytest.mark.long  # two runs and an export: half a minute
@pytest.mark.claim(
    "X42",
    command="fleetune train --smoke",
    seen="the longest batch first, an evaluation, a save, a resume in new processes and a checked export; nothing is kept",
)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_everything_is_tried_on_the_longest_batch_and_nothing_is_kept(place: Path, tiny_llama: Path, method: str) -> None:
    before = {path.name for path in place.iterdir()}
    done = fleetune(
        "train", "--model", tiny_llama, *WORDS, "--validation", "held.jsonl", "--method", method, "--no-packing",
        "--run", "runs/one", "--exact-match", "--max-new-tokens", "4", "--smoke", "--json", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 3 and found["resumed_from_step"] == 2
    first, second, third = found["tokens"]
    assert first > second + 30 and second >= third, "the two rows that stand last are the longest, and come first"
    assert found["save_bytes"] > 0 and found["validation_loss"] > 0
    assert found["export"] == ("adapter" if method == "lora" else "merged") and found["divergence"] >= 0
    assert {path.name for path in place.iterdir()} == before


def test_smoke_is_refused_where_nothing_can_be_tried(place: Path, tiny_llama: Path) -> None:
    with pytest.raises(UserError, match=r"smoke is of the command fleetune train, and fleetune\.train cannot try a run out"):
        package.train(model=tiny_llama, data=place / "rows.jsonl", smoke=True, run=place / "run")
    (place / "sweep.yaml").write_text(f"runs: {{one: {{model: {tiny_llama}, data: rows.jsonl, smoke: true}}}}\n")
    done = fleetune("compare", "sweep.yaml", cwd=place)
    assert done.returncode == 2 and "a sweep cannot try a run out" in done.stderr
    assert not (place / "run").exists()
