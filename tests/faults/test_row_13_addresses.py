"""Row 13: an interface that is not there, a name that does not resolve, a port that is taken: one clear error, at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import PATIENCE, SOURCE, Place


def test_a_wrong_interface_is_told_and_not_tried_again(place: Place) -> None:
    run = place.start("run", "--gpus", "2", environment={"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert run.end() == 2
    assert "GLOO_SOCKET_IFNAME" in run.text() and "nosuch0" in run.text()
    assert len([row for row in run.events("start") if "num_processes" in row]) == 1
    run.leaves_nothing()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["name", "port"])
def test_under_a_foreign_launcher_an_address_that_cannot_be_is_told(
    place: Place, golden: Callable[..., Path], fault: str
) -> None:
    """The worker as torchrun starts it, with a run folder that is prepared."""
    folder = golden()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "no-such-host.invalid" if fault == "name" else "127.0.0.1"
        environment = {
            **os.environ, "PYTHONPATH": str(SOURCE), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(taken.getsockname()[1]),
        }  # fmt: skip
        command = [sys.executable, "-m", "fleetune.training.worker", str(folder), "--attempt", "90"]
        began = time.monotonic()
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120 * PATIENCE)
    assert done.returncode == 2, done.stderr
    assert "MASTER_ADDR" in done.stderr and address in done.stderr
    assert time.monotonic() - began < 20 * PATIENCE  # with all imports
    (folder / "outcomes" / "rank-00000-attempt-090.json").unlink()
