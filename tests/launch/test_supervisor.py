"""One process; what is the same for several is tested here, without torch."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

from fleetune.launch.request import Commands
from fleetune.spec.errors import UserError
from launch.runs import PATIENCE, PYTHONPATH, TinyRun, wait_for


def test_a_run_that_ends_well_ends_with_0(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"steps": 3}})
    assert run.supervise() == 0
    assert run.attempts() == 1
    assert "rank 0 of attempt 0 speaks" in run.log()
    assert run.events("stop")[0]["kind"] == "done"
    assert run.said == ["looking at the rows"]
    assert not run.living()


def test_logs_are_private_and_nothing_of_the_environment_is_in_a_command_line(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"steps": 20, "step_s": 0.1}})
    seen: list[bytes] = []

    def look() -> None:
        for pid in run.living():
            seen.append(Path(f"/proc/{pid}/cmdline").read_bytes())

    from fleetune.launch.supervisor import supervise
    from launch.runs import tiny_launch

    launch = tiny_launch(environment={"PYTHONPATH": PYTHONPATH, "HF_TOKEN": "hf_verysecret1234"})
    assert supervise(run.folder, launch, on_poll=look, say=run.said.append) == 0
    assert seen and not any(b"hf_verysecret1234" in line for line in seen)
    assert json.loads((run.folder.path / "environment-0-0").read_text())["HF_TOKEN"] == "hf_verysecret1234"
    for path in run.folder.logs.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_caller_is_polled_ten_times_a_second(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"steps": 20, "step_s": 0.1}})
    began = time.monotonic()
    assert run.supervise() == 0
    rate = run.polls / (time.monotonic() - began)
    assert 4 < rate < 12


def test_what_the_person_must_mend_is_not_tried_again(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"steps": 1, "then": "user"}})
    assert run.supervise() == 2
    assert run.attempts() == 1
    assert "error: give another --data" in run.said


def test_a_user_error_of_the_preparation_is_passed_through(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {})
    assert run.supervise(prepare_arguments=("--then", "user")) == 2
    assert run.said == ["looking at the rows", "error: rows.jsonl has no rows: give another --data"]
    assert run.attempts() == 0 and not run.living()
    assert "0-0" not in run.pids(), "the worker ran although there was nothing to train on"


@pytest.mark.parametrize(
    ("then", "cause"), [("crash", "ZeroDivisionError: the preparation broke"), ("kill", "killed by signal 9 (SIGKILL)")]
)
def test_a_preparation_that_breaks_is_told_with_its_cause_and_log(tmp_path: Path, then: str, cause: str) -> None:
    run = TinyRun.make(tmp_path / "run", {})
    assert run.supervise(prepare_arguments=("--then", then)) == 1
    assert cause in run.said[-1] and str(run.folder.logs / "prepare-attempt-000.log") in run.said[-1]
    assert run.attempts() == 0 and not run.living()


def test_a_killed_worker_is_started_again_and_ends_well(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"0/0": {"steps": 3, "then": "kill"}, "1/0": {"first": 3, "steps": 2}})
    assert run.supervise() == 0
    assert run.attempts() == 2
    failure = run.events("failure")[0]
    assert (failure["rank"], failure["node"], failure["step"], failure["attempt"]) == (0, 0, 3, 0)
    assert "SIGKILL" in failure["cause"] and failure["log"] == str(run.folder.log(0, 0))
    assert run.events("restart")[0]["attempt"] == 1
    assert "attempt 1 speaks" in run.log(attempt=1)


def test_a_crash_without_progress_is_given_up_with_its_cause(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"steps": 2, "then": "crash"}})
    assert run.supervise() == 2
    # The first attempt made two steps; then come the restarts that make none.
    assert run.attempts() == 1 + 1 + PATIENCE.restarts
    message = run.said[-1]
    for part in ("rank 0", "node 0", "after step 2", "RuntimeError: the tiny worker broke", str(run.folder.log(0, 3))):
        assert part in message
    assert run.events("gave_up") and not run.living()


def test_progress_forgives_the_restarts_before_it(tmp_path: Path) -> None:
    """More crashes than restarts are allowed, but each attempt reaches further."""
    plans = {f"{attempt}/0": {"first": 2 * attempt, "steps": 2, "then": "checkpoint-and-kill"} for attempt in range(5)}
    run = TinyRun.make(tmp_path / "run", {**plans, "5/0": {"first": 10, "steps": 1}})
    assert run.supervise() == 0
    assert run.attempts() == 6 > PATIENCE.restarts + 1


def test_restarts_wait_longer_each_time(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"then": "crash"}})
    assert run.supervise() == 2
    assert [row["delay_s"] for row in run.events("restart")] == [0.1, 0.2]
    assert PATIENCE.backoff(100) == PATIENCE.backoff_limit_s


def test_a_worker_that_ends_without_an_outcome_has_crashed(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"0/0": {"then": "exit", "code": 0}})
    assert run.supervise() == 0
    assert "exit code 0" in run.events("failure")[0]["cause"]


def test_a_process_that_stays_after_it_is_done_is_ended(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"then": "linger"}})
    began = time.monotonic()
    assert run.supervise() == 0
    assert time.monotonic() - began < PATIENCE.cleanup_s + 6
    assert not run.living()


def test_a_later_start_has_higher_attempt_numbers(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"then": "user"}})
    assert run.supervise() == 2
    assert run.supervise() == 2
    assert [row["attempt"] for row in run.events("start")] == [0, 1]


def test_a_module_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {})
    commands = Commands(prepare="launch.tiny_prepare", worker="launch.no_such_worker", preload=())
    assert run.supervise(commands=commands) == 2
    assert "No module named 'launch.no_such_worker'" in run.said[-1]


def test_what_cannot_be_imported_ahead_of_time_is_no_error(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {})
    commands = Commands(prepare="launch.tiny_prepare", worker="launch.tiny_worker", preload=("launch.no_such_library",))
    assert run.supervise(commands=commands) == 0


def test_a_live_run_in_the_same_folder_is_refused_and_not_disturbed(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"steps": 30, "step_s": 0.1}})
    other = run.start()
    wait_for(lambda: "0-0" in run.pids())
    with pytest.raises(UserError, match=rf"process {other.pid} on "):
        run.supervise()
    assert other.wait(30) == 0
    assert run.attempts() == 1
    assert run.supervise() == 0  # the lease was given back


def test_a_file_of_the_current_folder_does_not_pass_for_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('a file of the current folder was imported')")
    monkeypatch.chdir(tmp_path)
    run = TinyRun.make(tmp_path / "run", {})
    assert run.supervise() == 0
