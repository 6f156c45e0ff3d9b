"""Row 4: kill -9 of the agent, whose workers would be orphans."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import PATIENCE, Place
from fleetune.launch.identity import process_mark


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_its_workers_die_with_it_and_the_run_goes_on(place: Place, golden: Callable[..., Path], processes: int) -> None:
    run = place.start("run", "--gpus", str(processes))
    workers = run.wait_workers(processes)
    run.wait_step(13)
    began = time.monotonic()
    run.kill(run.parent(workers[0]))
    run.wait(lambda: not any(process_mark(pid) for pid in workers.values()), 5, "for the end of the workers")
    assert time.monotonic() - began < 5 * PATIENCE
    assert run.end(240) == 0
    run.failed()
    run.recovered_within(15 if processes == 2 else 25)
    run.holds_to(golden("--gpus", str(processes)))


@pytest.mark.long
def test_the_process_with_the_imports_may_die_too(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "2")
    workers = run.wait_workers(2)
    run.wait_step(13)
    run.kill(run.parent(run.parent(workers[0])))
    assert run.end() == 0
    run.holds_to(golden("--gpus", "2"))
