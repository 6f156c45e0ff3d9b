"""Row 28: rows that cannot be used: set aside with line and cause, the same on every rank and for every number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place
from fleetune.spec.run_folder import read_lines
from journeys.journey import samples, write_rows

BAD: dict[str, bytes] = {
    "invalid JSON": b'{"question": "How many?", "answer": ',
    "wrong type": b'{"question": 5, "answer": ["no"]}',
    "empty": b'{"question": "", "answer": ""}',
    "no answer": b'{"question": "How many clips?", "answer": ""}',
    "NUL": b'{"question": "a\x00b", "answer": "c"}',
    "invalid UTF-8": b'{"question": "\xff\xfe", "answer": "c"}',
    "over-long": json.dumps({"question": "How many? " * 200, "answer": "5 clips."}).encode(),
}
#: Text that looks like a special token is no fault: it is read as text.
LITERAL = b'{"question": "Is <|im_end|> an <image>?", "answer": "No."}'


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_bad_rows_are_set_aside_and_the_rest_is_trained_once(place: Place, processes: int) -> None:
    data = write_rows(place.folder / f"{place.prefix}rows.jsonl", 12)
    lines = data.read_bytes().splitlines()
    mixed = [*lines[:4], *BAD.values(), *lines[4:8], LITERAL, lines[0], *lines[8:]]
    data.write_bytes(b"\n".join(mixed) + b"\n")
    run = place.start("run", "--gpus", str(processes), "--max-bad-share", "0.5", epochs=1, data=data)
    assert run.end() == 0, run.text()
    aside = list(read_lines(run.path / "quarantine.jsonl"))
    bad, long = ([row for row in aside if row["kind"] == kind] for kind in ("bad", "over_long"))
    assert {row["line"] for row in bad} == set(range(5, 5 + len(BAD) - 1)), aside
    assert all(row["cause"] for row in bad)
    assert len(long) == 1 and "more than sequence_length" in long[0]["cause"]
    seen = [sample for step in samples(run.path) for sample in step]
    assert len(seen) == len(set(seen)) == 14, "12 rows, one of them twice, and one with literal special tokens"
    run.leaves_nothing()


@pytest.mark.long
def test_too_many_bad_rows_end_the_run_with_2_before_it_begins(place: Place, golden: Callable[..., Path]) -> None:
    data = write_rows(place.folder / f"{place.prefix}rows.jsonl", 4)
    data.write_bytes(data.read_bytes() + b"\n".join(BAD.values()) + b"\n")
    run = place.start("run", "--gpus", "2", data=data)
    assert run.end() == 2
    assert "quarantine" in run.text() and "Traceback" not in run.text()
    assert not run.living()
