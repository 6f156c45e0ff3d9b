"""Row 12: a network that is slow, and slow in one direction alone: the run completes with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.harness import PATIENCE
from faults.test_row_10_partition import golden, machines, rows, start, steps
from journeys.journey import losses
from launch.machines import Machines

__all__ = ["golden", "machines"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("sides", ["ab", "b"])
def test_a_slow_line_slows_the_run_and_ends_nobody(machines: Machines, golden: Path, sides: str) -> None:
    run = f"slow-{sides}"
    for side in sides:
        machines.network(side, "tc", "qdisc", "add", "dev", f"v{side}", "root", "tbf", "rate", "10mbit", "burst", "16kb",
                         "latency", "400ms")  # fmt: skip
    process = start(machines, run)
    try:
        out, said = process.communicate(timeout=240 * PATIENCE)
    finally:
        process.kill()
        for side in sides:
            machines.network(side, "tc", "qdisc", "del", "dev", f"v{side}", "root")
    assert process.returncode == 0, out + said
    kinds = {row["event"] for row in rows(machines, run, "events.jsonl")}
    assert not kinds & {"failure", "hang", "restart"}, kinds
    assert steps(machines, run) == len(losses(golden))
    assert [row["loss_hex"] for row in rows(machines, run, "ledger.jsonl")] == losses(golden)
