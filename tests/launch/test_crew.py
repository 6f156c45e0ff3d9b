"""Several processes: our store, torch elastic's agent, and workers forked from it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleetune.launch.devices import usable_cores
from fleetune.launch.request import Commands, Patience
from launch.runs import PATIENCE, TinyRun, wait_for


def make(tmp_path: Path, plan: dict[str, Any], num_processes: int = 2, **others: dict[str, Any]) -> TinyRun:
    everybody = {f"*/{rank}": plan for rank in range(num_processes)}
    return TinyRun.make(
        tmp_path / "a $run$$ ${local_rank}", {**everybody, **{k.replace("_", "/"): v for k, v in others.items()}}
    )


def nothing_is_left(run: TinyRun) -> bool:
    return not run.living() and not run.store_pids()


def test_two_ranks_train_together_and_end_with_0(tmp_path: Path) -> None:
    run = make(tmp_path, {"steps": 5, "sync": True})
    listening: set[str] = set()

    def look() -> None:
        for pid in [*run.store_pids(), *run.pids().values()]:
            try:
                connections = psutil.Process(pid).net_connections("inet")
            except psutil.Error:
                continue
            listening.update(c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN)

    assert run.supervise(2, on_poll=look) == 0
    assert listening == {"127.0.0.1"}
    for rank in (0, 1):
        assert f"rank {rank} of attempt 0 speaks" in run.log(rank)
        environment = json.loads((run.folder.path / f"environment-0-{rank}").read_text())
        assert environment["WORLD_SIZE"] == "2" and environment["LOCAL_RANK"] == str(rank)
        assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        assert environment["OMP_NUM_THREADS"] == str(int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, usable_cores() // 2))
    assert nothing_is_left(run)


@pytest.mark.claim(
    "H5",
    command="fleetune train --gpus 2",
    seen="a killed process is found, named, and all start again from the last checkpoint",
)
def test_a_killed_rank_ends_its_peers_and_all_start_again(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "first": 4, "steps": 2}, **{
        "0_0": {"sync": True, "steps": 400, "step_s": 0.02},
        "0_1": {"sync": True, "steps": 4, "step_s": 0.02, "then": "kill"},
    })  # fmt: skip
    assert run.supervise(2) == 0
    assert run.attempts() == 2
    failure = run.events("failure")[0]
    assert failure["rank"] == 1, "the blame is on the rank that only noticed"
    assert "signal 9 (SIGKILL)" in failure["cause"] and failure["log"] == str(run.folder.log(1, 0))
    assert nothing_is_left(run)


def test_the_rank_that_broke_first_is_named_with_the_last_line_of_its_traceback(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "steps": 400, "step_s": 0.02}, **{
        "*_1": {"sync": True, "steps": 3, "step_s": 0.02, "then": "crash"},
    })  # fmt: skip
    assert run.supervise(2, patience=Patience(restarts=0, peers_s=1.0)) == 2
    message = run.said[-1]
    assert "rank 1 (node 0) failed" in message and "RuntimeError: the tiny worker broke" in message
    assert str(run.folder.log(1, 1)) in message
    assert nothing_is_left(run)


def test_a_rank_that_hangs_while_another_has_died_is_ended_in_bounded_time(tmp_path: Path) -> None:
    run = make(tmp_path, {}, **{"0_0": {"then": "hang"}, "0_1": {"then": "kill"}})
    assert run.supervise(2) == 0
    failed_at = run.events("failure")[0]["time"]
    began_at = run.events("start")[0]["time"]
    assert failed_at - began_at < PATIENCE.peers_s + 5
    assert run.events("failure")[0]["rank"] == 1


def test_a_user_error_on_one_rank_decides_for_all(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "steps": 400, "step_s": 0.02}, **{
        "*_1": {"sync": True, "steps": 2, "step_s": 0.02, "then": "user"},
    })  # fmt: skip
    assert run.supervise(2) == 2
    assert run.attempts() == 1 and "error: give another --data" in run.said
    assert nothing_is_left(run)


def test_sigterm_lets_all_ranks_save_and_ends_with_75(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "steps": 5000, "step_s": 0.02})
    process = run.start(2)
    wait_for(run.folder.ledger.exists, 60)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20) == 75
    assert list(run.folder.checkpoints.iterdir())
    assert nothing_is_left(run)


def is_running(pid: int) -> bool:
    """A dead process that nobody has reaped yet does not run; who inherits an orphan may take a while to."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_agent_leaves_no_worker_and_the_run_goes_on(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "first": 1, "steps": 3}, **{
        "0_0": {"then": "hang"}, "0_1": {"then": "hang"},
    })  # fmt: skip
    killed: list[float] = []

    def kill_agent() -> None:
        pids = run.pids()
        if not killed and {"0-0", "0-1"} <= pids.keys():
            os.kill(psutil.Process(pids["0-0"]).ppid(), signal.SIGKILL)
            killed.append(time.monotonic())
        elif len(killed) == 1 and not any(is_running(pids[name]) for name in ("0-0", "0-1")):
            killed.append(time.monotonic())

    assert run.supervise(2, on_poll=kill_agent) == 0
    assert run.attempts() == 2
    assert killed[1] - killed[0] < 5
    assert nothing_is_left(run)


def test_a_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    run = make(tmp_path, {"then": "hang"})
    process = run.start(2)
    wait_for(lambda: {"0-0", "0-1"} <= run.pids().keys(), 60)
    assert len(run.store_pids()) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait(5)
    wait_for(lambda: nothing_is_left(run), 5)


def test_a_killed_store_is_replaced_for_the_next_attempt(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "first": 1, "steps": 3}, **{
        "0_0": {"sync": True, "steps": 400, "step_s": 0.02},
        "0_1": {"sync": True, "steps": 100, "step_s": 0.02, "then": "kill"},
    })  # fmt: skip
    killed: list[int] = []

    def kill_store() -> None:
        if not killed and run.folder.ledger.exists():
            killed.extend(run.store_pids())
            os.kill(killed[0], signal.SIGKILL)

    assert run.supervise(2, on_poll=kill_store) == 0
    assert killed and run.attempts() == 2


def test_an_agent_that_cannot_start_is_told_with_its_cause(tmp_path: Path) -> None:
    run = make(tmp_path, {})
    commands = Commands(prepare="launch.tiny_prepare", worker="launch.tiny_worker", agent="launch.no_such_agent", preload=())
    assert run.supervise(2, commands=commands, patience=Patience(restarts=0)) == 2
    assert "0 of 2 workers were started: ModuleNotFoundError: No module named 'launch.no_such_agent'" in run.said[-1]
    assert nothing_is_left(run)


def test_workers_are_started_afresh_where_the_agent_must_not_fork(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "steps": 2})
    commands = Commands(prepare="launch.tiny_prepare", worker="launch.tiny_worker", preload=("launch.starts_cuda",))
    assert run.supervise(2, commands=commands) == 0
    assert "started afresh" in (run.folder.logs / "agent-attempt-000.log").read_text()
    assert "rank 1 of attempt 0 speaks" in run.log(1)
    assert nothing_is_left(run)


def test_supervising_in_a_thread_works_without_signals(tmp_path: Path) -> None:
    run = make(tmp_path, {"steps": 1}, num_processes=1)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run.supervise(1)))
    thread.start()
    thread.join(30)
    assert codes == [0]
