"""Real processes that hang in every way: found from outside, named, ended, and the run goes on."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import psutil
import pytest

from launch.runs import PATIENCE, TinyRun

#: Each waits out a real bound, several times over.
pytestmark = pytest.mark.long

#: The bound is shorter than a person's, so that the tests are too; a loaded machine must still keep a sleeping rank in time.
HASTY = dataclasses.replace(PATIENCE, hang_s=3.0, peers_s=3.0)


@pytest.mark.parametrize(("then", "word"), [("stop", "no sign of life"), ("hold", "no sign of life"), ("loop", "no progress")])
def test_a_rank_that_hangs_is_named_and_ended_and_the_run_goes_on(tmp_path: Path, then: str, word: str) -> None:
    waiting = {"sync": True, "steps": 500, "step_s": 0.05}
    run = TinyRun.make(tmp_path / "run", {
        "0/0": waiting, "0/1": {"sync": True, "steps": 5, "step_s": 0.05, "then": then},
        "1/0": {"sync": True, "first": 5, "steps": 3}, "1/1": {"sync": True, "first": 5, "steps": 3},
    })  # fmt: skip
    assert run.supervise(2, patience=HASTY) == 0
    assert run.attempts() == 2
    failure, hang = run.events("failure")[0], run.events("hang")[0]
    assert (failure["rank"], failure["step"], hang["phase"]) == (1, 5, "step")
    assert word in failure["cause"] and "in step 6" in failure["cause"] and failure["log"] == str(run.folder.log(1, 0))
    assert 2.5 < failure["detection_s"] < 10
    assert run.events("recovered")[0]["recovery_s"] > 0
    if then != "stop":
        assert "Current thread" in run.log(1, 0) or "Thread 0x" in run.log(1, 0), "where it hung was not written down"
    assert not run.living()


def test_one_process_alone_is_watched_too(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"0/0": {"steps": 3, "then": "hold"}, "1/0": {"first": 3, "steps": 1}})
    assert run.supervise(1, patience=HASTY) == 0
    assert run.events("hang")[0]["rank"] == 0 and not run.living()


def test_without_a_bound_nobody_is_ended(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"0/0": {"steps": 3, "then": "stop"}})
    woken: list[int] = []

    def wake() -> None:
        pids = run.pids()
        if run.polls > 40 and not woken and "0-0" in pids:
            woken.append(pids["0-0"])
            os.kill(pids["0-0"], signal.SIGCONT)

    assert run.supervise(1, wake, patience=dataclasses.replace(HASTY, hang_s=0.0)) == 0
    assert woken and run.attempts() == 1


def test_a_stopped_agent_is_found(tmp_path: Path) -> None:
    """The workers go on without it, but the end of one would never be reported."""
    plan = {"sync": True, "steps": 2000, "step_s": 0.05}
    after = {"sync": True, "first": 5, "steps": 3}
    run = TinyRun.make(tmp_path / "run", {"0/0": plan, "0/1": plan, "1/0": after, "1/1": after})
    stopped: list[int] = []

    def stop() -> None:
        pids = run.pids()
        if not stopped and {"0-0", "0-1"} <= pids.keys() and run.folder.ledger.exists():
            stopped.append(psutil.Process(pids["0-0"]).ppid())
            os.kill(stopped[0], signal.SIGSTOP)

    assert run.supervise(2, stop, patience=HASTY) == 0
    assert run.attempts() == 2 and "agent" in run.events("failure")[0]["cause"]
    assert not run.living()


def test_what_each_rank_is_doing_can_be_seen_from_outside(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"*/0": {"steps": 30, "step_s": 0.1}})
    seen: list[str] = []
    assert run.supervise(1, lambda: seen.extend(path.read_text() for path in run.folder.heartbeat.glob("rank-*.json"))) == 0
    assert any('"phase": "step"' in text and '"rank": 0' in text for text in seen)
    assert not list(run.folder.heartbeat.iterdir()), "heartbeats of nobody are left"


def test_a_nursery_that_dies_is_replaced(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"0/0": {"steps": 500, "step_s": 0.05}, "1/0": {"first": 1, "steps": 2}})
    killed: list[int] = []

    def kill() -> None:
        if not killed and run.folder.ledger.exists():
            killed.append(psutil.Process(run.pids()["0-0"]).ppid())
            os.kill(killed[0], signal.SIGKILL)

    assert run.supervise(1, kill) == 0
    assert run.attempts() == 2 and not run.living()


def test_a_restart_forks_from_the_process_that_has_the_imports(tmp_path: Path) -> None:
    run = TinyRun.make(tmp_path / "run", {"0/0": {"steps": 3, "then": "kill"}, "1/0": {"first": 3, "steps": 5, "step_s": 0.1}})
    parents: set[int] = set()

    def look() -> None:
        for name, pid in run.pids().items():
            if name != "prepare":
                try:
                    parents.add(psutil.Process(pid).ppid())
                except psutil.Error:
                    continue

    assert run.supervise(1, look) == 0
    assert run.attempts() == 2 and len(parents - {1}) == 1
