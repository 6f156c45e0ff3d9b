"""What fits is found out by failing, and remembered: from events and outcomes alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fleetune.spec.errors import UserError
from fleetune.spec.records import Outcome
from fleetune.spec.run_folder import RunFolder, append_line, write_json
from fleetune.training.room import Room, kills, known_room, why_short


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def happened(folder: RunFolder, *rows: dict[str, Any]) -> None:
    for row in rows:
        append_line(folder.events, row)


START = {"event": "start", "attempt": 0, "micro_batch_size": 8, "oom_kills": 3}
KILLED = {"event": "failure", "attempt": 0, "rank": 1, "cause": "killed by signal 9 (SIGKILL): somebody killed it"}


def test_a_kill_counts_as_one_for_lack_of_memory_only_where_the_kernel_has_counted_one_more(folder: RunFolder):
    happened(folder, START, KILLED)
    assert why_short(folder, 4) == "the kernel killed rank 1 for lack of memory"
    assert why_short(folder, 3) is None, "somebody killed it"
    happened(
        folder, {"event": "start", "attempt": 1, "oom_kills": 4}, {"event": "failure", "attempt": 1, "cause": "ValueError"}
    )
    assert why_short(folder, 5) is None, "another process of the group was killed, and this one failed by itself"


def test_an_error_that_a_rank_raised_counts_and_only_for_the_last_attempt(folder: RunFolder):
    happened(folder, START, {"event": "failure", "attempt": 0, "rank": 0, "cause": "out of memory: MemoryError"})
    outcome = Outcome("crash", "out of memory: MemoryError: ", 1, 0, 0, 0, detail={"out_of_memory": True})
    write_json(folder.outcome(0, 0), asdict(outcome))
    assert why_short(folder, 3) == "out of memory: MemoryError: "
    happened(folder, {"event": "stop", "kind": "preempted", "attempt": 1})
    assert why_short(folder, 9) is None, "a later attempt ended in peace"


def test_a_size_that_was_rehearsed_is_known_and_one_that_the_attempt_died_of_is_halved():
    given = Room(2, may_grow=True)
    tried = [{"event": "rehearsal", "micro_batch_size": size} for size in (2, 4, 8)]
    room = known_room(tried, given)
    assert (room.micro_batch_size, room.may_grow) == (8, True)
    smaller = room.smaller("the kernel killed rank 0 for lack of memory")
    assert (smaller.micro_batch_size, smaller.may_grow) == (4, False)
    failed = {"event": "out_of_memory", "micro_batch_size": 4, "gradient_checkpointing": False}
    room = known_room([*tried, failed, {"event": "rehearsal", "micro_batch_size": 4}], given)
    assert (room.micro_batch_size, room.may_grow) == (4, False)
    assert known_room(tried, Room(2)).micro_batch_size == 2, "the person gives the size now"


def test_first_smaller_micro_batches_then_checkpointing_then_the_person_with_remedies():
    room, seen = Room(4), []
    for _ in range(3):
        room = room.smaller("it did not fit")
        seen.append((room.micro_batch_size, room.gradient_checkpointing))
    assert seen == [(2, False), (1, False), (1, True)]
    with pytest.raises(UserError, match=r"not even with gradient checkpointing \(it did not fit\).*--sequence-length"):
        room.smaller("it did not fit")


def test_what_did_not_fit_once_is_not_tried_again_and_a_person_may_ask_for_less():
    rows = [{"event": "out_of_memory", "micro_batch_size": size, "gradient_checkpointing": size == 1} for size in (4, 1)]
    assert known_room(rows, Room(8)) == Room(1, True)
    assert known_room(rows[:1], Room(2)) == Room(2, False)
    assert known_room([], Room(None)) == Room(None)


def test_the_kernels_count_can_be_read_here():
    assert kills() >= 0
