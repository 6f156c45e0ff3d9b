from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from fleetune.launch.child import Call, parse
from fleetune.launch.ending import Evidence, first_error, judge, next_attempt, progress, read_outcomes
from fleetune.launch.processes import LogTail
from fleetune.spec.records import Outcome
from fleetune.spec.run_folder import RunFolder, append_line, write_json


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path)
    made.create()
    return made


def outcome(kind: str, rank: int, at: float = 0.0) -> tuple[Outcome, float]:
    return Outcome(kind, f"{kind} of {rank}", {"done": 0, "user": 2, "preempted": 75}.get(kind, 1), rank, 0, 0), at


def ending(folder: RunFolder, *given: tuple[Outcome, float], num_processes: int = 2, **more: object):  # type: ignore[no-untyped-def]
    values = {"deaths": {}, "exit_codes": {}, "killed": frozenset(), "asked_to_stop": False, **more}
    outcomes = {one.rank: (one, at) for one, at in given}
    return judge(Evidence(num_processes=num_processes, outcomes=outcomes, **values), folder, 0)  # type: ignore[arg-type]


def test_all_done_is_done_and_less_is_not(folder: RunFolder) -> None:
    assert ending(folder, outcome("done", 0), outcome("done", 1)).kind == "done"
    assert ending(folder, outcome("done", 0), deaths={1: 5.0}).kind == "crash"


@pytest.mark.parametrize("kind", ["user", "preempted"])
def test_a_wish_of_one_rank_comes_before_the_crashes_that_follow_from_it(folder: RunFolder, kind: str) -> None:
    found = ending(folder, outcome("crash", 0, 1.0), outcome(kind, 1, 2.0))
    assert (found.kind, found.rank, found.cause) == (kind, 1, f"{kind} of 1")


def test_of_two_crashes_the_first_is_the_cause(folder: RunFolder) -> None:
    assert ending(folder, outcome("crash", 0, 2.0), outcome("crash", 1, 1.0)).rank == 1


def test_a_rank_that_vanished_is_the_cause_even_when_it_is_noticed_later(folder: RunFolder) -> None:
    found = ending(folder, outcome("crash", 0, 1.0), deaths={1: 1.1}, exit_codes={1: -11})
    assert found.rank == 1 and "signal 11 (SIGSEGV)" in found.cause


def test_a_rank_that_was_only_told_to_go_is_not_the_cause(folder: RunFolder) -> None:
    assert ending(folder, outcome("crash", 0, 1.0), deaths={1: 1.1}, exit_codes={1: -signal.SIGTERM}).rank == 0
    assert ending(folder, outcome("crash", 0, 1.0), deaths={1: 1.1}, killed=frozenset({1})).rank == 0


def test_a_worker_that_ended_by_our_sigterm_before_it_began_was_preempted(folder: RunFolder) -> None:
    found = ending(folder, num_processes=1, deaths={0: 1.0}, exit_codes={0: -signal.SIGTERM}, asked_to_stop=True)
    assert found.kind == "preempted"
    unasked = ending(folder, num_processes=1, deaths={0: 1.0}, exit_codes={0: -signal.SIGTERM})
    assert unasked.kind == "crash"


def test_a_damaged_outcome_counts_as_none(folder: RunFolder) -> None:
    folder.outcome(0, 0).write_text("{")
    write_json(folder.outcome(1, 0), {**asdict(outcome("done", 1)[0]), "of a later version": 1})
    assert read_outcomes(folder, 0, range(2)).keys() == {1}


def test_the_first_traceback_of_a_log_names_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "starting\nTraceback (most recent call last):\n  File 'a', line 1\n    x = 1/0\nZeroDivisionError: division by zero\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  File 'b'\nRuntimeError: later\n"
    )
    assert first_error(log) == "ZeroDivisionError: division by zero"
    log.write_text("all is well\n")
    assert first_error(log) is None
    assert first_error(tmp_path / "absent") is None


def test_progress_is_a_whole_checkpoint_or_a_step(folder: RunFolder) -> None:
    assert progress(folder) == (0, 0)
    append_line(folder.ledger, {"attempt": 0, "step": 7})
    append_line(folder.ledger, {"attempt": 1, "step": 3})
    (folder.checkpoints / "step-000005").mkdir()
    (folder.checkpoints / "step-000005" / "manifest.json").write_text("{}")
    (folder.checkpoints / "step-000009.tmp-x").mkdir()
    (folder.checkpoints / "step-000008").mkdir()  # without a manifest it does not exist
    assert progress(folder) == (5, 7)


def test_the_next_attempt_is_above_every_trace_of_an_earlier_one(folder: RunFolder) -> None:
    assert next_attempt(folder) == 0
    folder.log(3, 4).touch()
    assert next_attempt(folder) == 5
    append_line(folder.ledger, {"attempt": 11, "step": 3})
    assert next_attempt(folder) == 12


def test_only_whole_new_lines_are_followed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    tail = LogTail(log)
    assert tail.new_lines() == []
    with open(log, "a") as file:
        file.write("new\nhal")
    assert tail.new_lines() == ["new"]
    with open(log, "a") as file:
        file.write("f\n")
    assert tail.new_lines() == ["half"]


def test_a_call_survives_the_way_through_a_command_line() -> None:
    call = Call("a.b", ("-x", "--wait", "runs/a b"), preload=("torch", "x.y"), waits=True, single_threaded=True)
    assert parse(call.argv()) == call
    with pytest.raises(ValueError, match="--unknown"):
        parse(["--unknown", "module"])
