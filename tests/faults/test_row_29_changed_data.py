"""Row 29: the data set was changed, or cut off, between two starts of a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from faults.harness import Place
from journeys.journey import write_rows


def edit(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace("clips", "coins")
    path.write_text("\n".join(lines) + "\n")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.long
@pytest.mark.parametrize("change", [edit, cut], ids=lambda change: change.__name__)
def test_the_run_does_not_go_on_with_other_rows(place: Place, change: object) -> None:
    data = write_rows(place.folder / f"{place.prefix}rows.jsonl", 24)
    run = place.start("run", data=data, epochs=12)
    run.wait_step(5)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 75
    before = len(run.rows())
    change(data)  # type: ignore[operator]
    run.begin("--resume")
    assert run.end() == 2
    assert "data" in run.text() and "new run" in run.text() and "Traceback" not in run.text()
    assert len(run.rows()) == before
    run.leaves_nothing()
