"""Row 20: kill -9 before every operation that a save makes on the disk. (`tests/checkpoint/test_crash.py` goes through every
state that a power cut may leave behind each of them, in every order; here whole runs die there and go on.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place

#: Each attempt makes one save and dies in its second one, one operation earlier than the attempt before. A save is at most 25
#: operations of rank 0, a few more where it finds leftovers, and 8 of rank 1. (Of all writes to one file, two count.)
LAST = {0: 58, 1: 16}
FIRST = {0: 24, 1: 9}
#: What must have been met; leftovers of one death move what the next one meets, so the last of them is left to chance.
KINDS = {
    0: {"make_folder", "create", "write", "sync", "rename", "sync_folder", "remove_file"},
    1: {"create", "write", "sync", "rename"},
}


@pytest.mark.long
@pytest.mark.parametrize(("rank", "mode"), [(0, "blocking"), (1, "background")])
def test_a_run_that_dies_at_every_operation_of_a_save_loses_nothing(
    place: Place, golden: Callable[..., Path], tmp_path: Path, rank: int, mode: str
) -> None:
    counts = range(LAST[rank], FIRST[rank] - 1, -1)
    faults = [
        {"at": "disk", "count": count, "rank": rank, "do": "kill", "once": str(tmp_path / f"once-{count}"),
         "after": str(tmp_path / f"once-{count + 1}") if count < LAST[rank] else None}
        for count in counts
    ]  # fmt: skip
    run = place.start(
        "run", "--gpus", "2", "--checkpoint-every", "1", "--save-mode", mode, "--max-restarts", "9", epochs=10, faults=faults
    )
    assert run.end(600) == 0
    died_at = [(tmp_path / f"once-{count}").read_text() for count in counts]
    assert set(died_at) >= KINDS[rank], f"not every kind of operation was met: {died_at}"
    assert run.account()["failures"] == len(counts)
    assert {row["rank"] for row in run.events("failure")} == {rank}
    assert not run.events("checkpoint_refused"), "a checkpoint that was not whole had the name of one that is"
    run.holds_to(golden("--gpus", "2", epochs=10), interval=8)
