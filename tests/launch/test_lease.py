from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleetune.launch.identity import Identity, process_mark, wait_until_dead
from fleetune.launch.lease import Lease
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_json, write_json


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def holder(folder: RunFolder) -> dict[str, Any]:
    return read_json(folder.lease)["holder"]


def test_a_lease_names_its_holder_and_is_given_back(folder: RunFolder) -> None:
    with Lease.take(folder) as lease:
        held = holder(folder)
        assert (held["host"], held["pid"]) == (socket.gethostname(), os.getpid())
        assert held["started"] == process_mark(os.getpid())
        assert lease.generation == 1
    assert read_json(folder.lease)["holder"] is None
    with Lease.take(folder) as again:
        assert again.generation == 2
    assert [path.name for path in folder.path.glob(".lease*")] == []


def test_a_live_holder_is_refused_by_name(folder: RunFolder) -> None:
    with Lease.take(folder), pytest.raises(UserError, match=f"process {os.getpid()} on {socket.gethostname()}") as caught:
        Lease.take(folder)
    assert f"kill {os.getpid()}" in str(caught.value)


def test_a_dead_holders_lease_is_taken_over(folder: RunFolder) -> None:
    code = (
        "import sys; from pathlib import Path; from fleetune.launch.lease import Lease; "
        "from fleetune.spec.run_folder import RunFolder; Lease.take(RunFolder(Path(sys.argv[1]))); "
        "print('held', flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(UserError):
        Lease.take(folder)
    process.kill()
    process.wait()
    assert Lease.take(folder).generation == 2


def test_a_number_that_another_process_has_now_does_not_count_as_the_holder(folder: RunFolder) -> None:
    write_json(
        folder.lease, {"generation": 4, "holder": {"host": socket.gethostname(), "pid": os.getpid(), "started": "old:1"}}
    )
    assert Lease.take(folder).generation == 5


def test_a_holder_on_another_machine_is_never_taken_for_dead(folder: RunFolder) -> None:
    write_json(folder.lease, {"generation": 4, "holder": {"host": "elsewhere", "pid": 1, "started": "x", "since": 0}})
    with pytest.raises(UserError, match="elsewhere") as caught:
        Lease.take(folder)
    assert f"remove {folder.lease}" in str(caught.value)


def test_a_claim_of_one_that_died_before_it_wrote_the_lease_is_passed(folder: RunFolder) -> None:
    Lease.take(folder).release()
    dead = {"host": socket.gethostname(), "pid": 2**22 - 1, "started": "x:1"}
    write_json(folder.path / ".lease-000002.json", {"generation": 2, "holder": dead})
    assert Lease.take(folder).generation == 3


def test_a_claim_of_a_live_process_that_is_not_done_yet_is_respected(folder: RunFolder) -> None:
    me = {"host": socket.gethostname(), "pid": os.getpid(), "started": process_mark(os.getpid()), "since": time.time()}
    write_json(folder.path / ".lease-000001.json", {"generation": 1, "holder": me})
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        Lease.take(folder)


def test_a_damaged_lease_is_refused_by_its_name(folder: RunFolder) -> None:
    folder.lease.write_text("{")
    with pytest.raises(UserError, match=r"lease\.json cannot be read"):
        Lease.take(folder)


def test_releasing_does_not_take_the_lease_of_a_later_holder(folder: RunFolder) -> None:
    first = Lease.take(folder)
    write_json(folder.lease, {"generation": 9, "holder": {"host": "elsewhere", "pid": 1, "started": "x"}})
    first.release()
    assert holder(folder)["host"] == "elsewhere"


def _compete(path: str, start: float, results: str) -> None:
    time.sleep(max(0.0, start - time.time()))
    try:
        lease = Lease.take(RunFolder(Path(path)))
    except UserError:
        return
    with open(results, "a") as file:
        file.write(json.dumps([os.getpid(), lease.generation]) + "\n")
    time.sleep(30)


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_at_once_exactly_one_gets_it(folder: RunFolder, tmp_path: Path, stale: bool) -> None:
    context = multiprocessing.get_context("fork")
    for round_ in range(5):
        if stale:
            dead = {"host": socket.gethostname(), "pid": 2**22 - 1, "started": "x:1"}
            write_json(folder.lease, {"generation": 10 * (round_ + 1), "holder": dead})
        results = tmp_path / f"results-{round_}"
        start = time.time() + 0.3
        processes = [context.Process(target=_compete, args=(str(folder.path), start, str(results))) for _ in range(6)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 10
        while sum(process.is_alive() for process in processes) > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)
        winners = results.read_text().splitlines()
        for process in processes:
            process.kill()
            process.join()
        assert len(winners) == 1, winners


def test_a_zombie_counts_as_dead() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    identity = Identity.of(pid)
    assert identity.lives
    os.kill(pid, signal.SIGKILL)
    assert wait_until_dead([identity], 5) == []  # not reaped yet
    os.waitpid(pid, 0)
    assert process_mark(pid) is None
