from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.monitor.account import account_of, account_rows
from fleetune.monitor.summary import summary_lines
from fleetune.spec.run_folder import RunFolder, append_line


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Two sessions: in the first a failure after step 3, with a checkpoint at 2; the second was killed, without a last word."""
    made = RunFolder(tmp_path)
    events = [
        {"event": "start", "attempt": 0, "elapsed_s": 4.0},
        {"event": "start", "attempt": 0, "from_step": 0},
        {"event": "first_step", "attempt": 0, "elapsed_s": 6.0, "recovery_s": 6.0},
        {"event": "save", "attempt": 0, "step": 2, "seconds": 0.5},
        {"event": "failure", "attempt": 0, "elapsed_s": 10.0, "detection_s": 0.1},
        {"event": "restart", "attempt": 1, "elapsed_s": 10.0},
        {"event": "recovered", "attempt": 1, "elapsed_s": 12.0, "recovery_s": 2.0},
        {"event": "save", "attempt": 1, "step": 4, "seconds": 0.3, "stall_s": 0.1},
        {"event": "stop", "attempt": 1, "elapsed_s": 14.0, "kind": "preempted"},
        {"event": "start", "attempt": 2, "elapsed_s": 3.0},
        {"event": "first_step", "attempt": 2, "elapsed_s": 4.0, "recovery_s": 4.0},
        {"event": "hang", "attempt": 2, "elapsed_s": 6.0},
    ]
    for row in events:
        append_line(made.events, row)
    for attempt, step in ((0, 1), (0, 2), (0, 3), (1, 3), (1, 4), (2, 5)):
        append_line(made.metrics, {"attempt": attempt, "step": step, "loss": 1.0, "step_s": 1.5, "data_wait_s": 0.5})
        append_line(made.ledger, {"attempt": attempt, "step": step, "samples": [f"a:{step}"], "loss_hex": "0x1p+0"})
    return made


def test_the_account_adds_up(folder: RunFolder) -> None:
    account = account_of(folder)
    assert (account.sessions, account.failures, account.restarts, account.saves) == (2, 1, 1, 2)
    assert account.wall_s == 20.0 and account.effective_s == 10.0
    assert account.effective_training_time_ratio == 0.5
    assert (account.mean_detection_s, account.mean_recovery_s, account.cold_start_s) == (0.1, 2.0, 5.0)
    assert account.recomputed_steps == 1
    assert account.save_stall_s == pytest.approx(0.3)


def test_a_person_reads_it_where_something_has_failed(folder: RunFolder) -> None:
    account = account_of(folder).to_json()
    lines = summary_lines({"steps": 5, "account": account})
    assert any("effective training time" in line and "50.0 %" in line for line in lines)
    assert any("failures" in line and "1, 1 restart" in line for line in lines)
    quiet = {**account, "failures": 0, "recomputed_steps": 0}
    assert summary_lines({"steps": 5, "account": quiet}) == ["steps  5"]


def test_a_run_that_never_came_to_anything_has_an_account_too(tmp_path: Path) -> None:
    account = account_of(RunFolder(tmp_path))
    assert account.effective_training_time_ratio is None and account.mean_recovery_s is None and not account.is_eventful
    assert account_rows(account.to_json()) == [("steps made again", "0")]
