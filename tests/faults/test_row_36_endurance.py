"""Row 36: thousands of restarts: neither open files, nor memory, nor processes grow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from fleetune.launch.lifeline import Lifeline
from fleetune.launch.liveness import Liveness
from fleetune.launch.nursery import Nursery
from fleetune.launch.processes import Surroundings
from fleetune.launch.request import Commands
from fleetune.launch.team import start_solo
from fleetune.spec.run_folder import RunFolder
from launch.runs import PYTHONPATH


@pytest.mark.parametrize("restarts", [200, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3000)])])
def test_nothing_grows_with_the_number_of_restarts(tmp_path: Path, restarts: int) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    lifeline = Lifeline()
    nursery = Nursery(folder, (), Surroundings({**os.environ, "PYTHONPATH": PYTHONPATH}, lifeline))
    commands = Commands(worker="faults.short_worker", preload=())
    me, server = psutil.Process(), psutil.Process(nursery.process.pid)

    def restart(attempt: int) -> None:
        team = start_solo(nursery, commands, folder, attempt, Liveness(10.0), variables={})
        while not team.is_over:
            team.look()
            time.sleep(0.0005)
        assert team.close() == [] and team.exit_codes == {0: 1}
        folder.log(0, attempt).unlink()

    def sizes() -> tuple[int, int, int, int]:
        return me.num_fds(), server.num_fds(), server.memory_info().rss, len(server.children())

    for attempt in range(50):
        restart(attempt)
    before = sizes()
    for attempt in range(50, restarts):
        restart(attempt)
    # The last child may not have been let go yet.
    time.sleep(0.2)
    after = sizes()
    nursery.close()
    lifeline.close()
    assert after[0] <= before[0] and after[1] <= before[1], (before, after)
    assert after[2] < before[2] + (2 << 20), "the process that forks has grown"
    assert after[3] <= 1, "ended processes are kept"
