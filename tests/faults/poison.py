"""Real causes of bad numbers: a model with a spoilt embedding, and rows that meet it or that no model could have learned."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fleetune.spec.run_folder import read_lines
from journeys.journey import rows_of

#: A character that no other row has; its embedding is what `spoil_embedding` spoils.
MARK = "~"


def spoil_embedding(model: Path, folder: Path, value: float) -> Path:
    """A copy of a model folder in which the input embedding of `MARK` is `value` everywhere."""
    import shutil

    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    (token,) = AutoTokenizer.from_pretrained(folder).encode(MARK, add_special_tokens=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_rows(path: Path, num_rows: int, poisoned: dict[int, str]) -> Path:
    """Easy rows, except that the answers of some are as given."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(num_rows):
            answer = poisoned.get(number, f"{number + number % 7} clips.")
            file.write(json.dumps({"question": f"How many clips are {number} and {number % 7}?", "answer": answer}) + "\n")
    return path


def gibberish(num_characters: int = 24) -> str:
    """What nobody can foresee: printable characters drawn at random."""
    return "".join(random.Random(5).choices([chr(code) for code in range(33, 126) if chr(code) != MARK], k=num_characters))


def steps_with(run: Path, row: int) -> list[int]:
    """Steps of the effective ledger that have a row of the data."""
    ledger = {row["step"]: row for row in rows_of(run / "ledger.jsonl")}
    return sorted(
        step for step, entry in ledger.items() if any(sample.split(":")[1] == str(row) for sample in entry["samples"])
    )


def ledger_of(run: Path) -> dict[int, dict]:
    """The effective ledger by step: the last row of each."""
    return {row["step"]: row for row in rows_of(run / "ledger.jsonl")}


def events_of(run: Path, kind: str) -> list[dict]:
    return [row for row in read_lines(run / "events.jsonl") if row["event"] == kind]
