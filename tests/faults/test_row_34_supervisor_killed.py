"""Row 34: whoever started the run dies (a terminal, an ssh session, a SLURM step): nothing runs on, nothing runs twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import PATIENCE, Place
from journeys.journey import fleetune


@pytest.mark.long
def test_its_processes_die_with_it_and_the_run_can_be_resumed(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "2")
    workers = run.wait_workers(2)
    run.wait_step(11)
    everybody = run.living()
    assert set(workers.values()) <= set(everybody)
    run.kill(run.process.pid)
    run.process.wait()
    began = time.monotonic()
    while run.living():
        assert time.monotonic() - began < 5 * PATIENCE, run.living()
        time.sleep(0.05)
    run.begin("--resume")
    assert run.end() == 0
    run.holds_to(golden("--gpus", "2"), interval=72)


@pytest.mark.long
def test_while_it_lives_no_second_run_can_start_in_its_folder(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "2")
    run.wait_step(5)
    second = fleetune(*run.words, "--resume", cwd=place.folder)
    assert second.returncode == 2 and f"process {run.process.pid}" in second.stderr
    assert run.end() == 0
    run.holds_to(golden("--gpus", "2"))
