"""Ctrl-C, SIGTERM, kill -9: of a supervisor in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from launch.runs import TinyRun, wait_for


def started(tmp_path: Path, plan: dict, num_processes: int = 1) -> tuple[TinyRun, object]:
    run = TinyRun.make(tmp_path / "run", {f"*/{rank}": plan for rank in range(num_processes)})
    process = run.start(num_processes)
    wait_for(lambda: all(f"0-{rank}" in run.pids() for rank in range(num_processes)), 40)
    wait_for(lambda: run.folder.ledger.exists() or plan.get("steps", 0) == 0)
    return run, process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_makes_the_worker_save_and_end_with_75(tmp_path: Path, number: signal.Signals) -> None:
    run, process = started(tmp_path, {"steps": 1000, "step_s": 0.05})
    os.kill(process.pid, number)
    assert process.wait(20) == 75
    assert list(run.folder.checkpoints.iterdir())
    assert run.attempts() == 1 and "saved after step" in process.stdout.read()
    assert not run.living()


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    run, process = started(tmp_path, {"then": "hang"})
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None, "one Ctrl-C killed a worker that may still be saving"
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(10) == 1
    assert "second Ctrl-C" in process.stdout.read()
    assert not run.living()


def test_one_ctrl_c_delivered_twice_is_one(tmp_path: Path) -> None:
    _, process = started(tmp_path, {"steps": 1000, "step_s": 0.3})
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) == 75


def test_ctrl_c_in_the_terminal_does_not_reach_the_workers(tmp_path: Path) -> None:
    """The terminal signals the whole group in the foreground; workers must only hear of it from the supervisor."""
    run, process = started(tmp_path, {"steps": 1000, "step_s": 0.05})
    assert os.getpgid(run.pids()["0-0"]) != os.getpgid(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 75
    assert list(run.folder.checkpoints.iterdir())


def test_stopping_while_preparing_ends_at_once(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {})
    process = run.start(then="wait")
    wait_for(lambda: "prepare" in run.pids())
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(10) == 75
    assert "while preparing" in process.stdout.read()
    assert not run.living()


def test_a_killed_supervisor_takes_its_worker_along(tmp_path: Path) -> None:
    run, process = started(tmp_path, {"then": "hang"})
    os.kill(process.pid, signal.SIGKILL)
    process.wait(5)
    wait_for(lambda: not run.living(), 5)


def test_a_killed_supervisor_takes_its_preparation_along(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {})
    process = run.start(then="wait")
    wait_for(lambda: "prepare" in run.pids())
    os.kill(process.pid, signal.SIGKILL)
    process.wait(5)
    wait_for(lambda: not run.living(), 5)


def test_the_folder_of_a_killed_supervisor_can_be_used_again(tmp_path: Path) -> None:
    run, process = started(tmp_path, {"then": "hang"})
    os.kill(process.pid, signal.SIGKILL)
    process.wait(5)
    wait_for(lambda: not run.living(), 5)
    (run.folder.path / "behaviour.json").write_text("{}")
    assert run.supervise() == 0
    assert [row["attempt"] for row in run.events("start")] == [0, 1]


def test_without_the_kernels_help_the_pipe_alone_ends_a_worker(tmp_path: Path) -> None:
    """PR_SET_PDEATHSIG is switched off in the worker; its thread at the pipe remains."""
    run, process = started(tmp_path, {"then": "hang", "forget_parent": True})
    os.kill(process.pid, signal.SIGKILL)
    process.wait(5)
    wait_for(lambda: not run.living(), 5)
    assert "the supervisor is gone" in run.log()
