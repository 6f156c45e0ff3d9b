"""Row 30: last batches that are not full, fewer rows than ranks, none at all: no hang, each row exactly once an epoch."""

from __future__ import annotations

from collections import Counter

import pytest

from faults.harness import Place
from journeys.journey import samples, write_rows

PROCESSES = 2


@pytest.mark.long
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5])
def test_every_row_is_trained_once_an_epoch(place: Place, rows: int) -> None:
    data = write_rows(place.folder / f"{place.prefix}rows.jsonl", rows)
    run = place.start("run", "--gpus", str(PROCESSES), data=data, epochs=3)
    if rows == 0:
        assert run.end() == 2
        assert "no rows" in run.text() or "empty" in run.text(), run.text()
        return
    assert run.end() == 0, run.text()
    seen = Counter(sample for step in samples(run.path) for sample in step)
    assert len(seen) == rows and set(seen.values()) == {3}
    run.leaves_nothing()
