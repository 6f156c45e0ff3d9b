"""Row 10: the network between two machines breaks, in every way: a pulled cable, a route into nowhere, a line on which only one
side is heard. It is found in time, the side without the driver ends and commits nothing, and the run goes on afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.harness import PATIENCE
from journeys.journey import SMALL, fleetune, losses, write_rows
from launch.machines import ADDRESSES, Machines, two_machines

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

#: Enough steps for a fault in their middle; the undisturbed run makes them in a few seconds.
NUM_STEPS = 240
WORDS = [*SMALL, "--micro-batch-size", "1", "--checkpoint-every", "4", "--max-steps", str(NUM_STEPS), "--epochs", "100"]
#: Where the network is broken, by what, and what mends it. `tbf` with a rate of next to nothing swallows all that is sent.
SWALLOW = ("root", "tbf", "rate", "8bit", "burst", "1", "limit", "1")
BREAKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "cable": ("a", ("ip", "link", "set", "va", "down"), ("ip", "link", "set", "va", "up")),
    "blackhole": (
        "b",
        ("ip", "route", "add", "blackhole", f"{ADDRESSES['a']}/32"),
        ("ip", "route", "del", "blackhole", f"{ADDRESSES['a']}/32"),
    ),
    "deaf driver": ("b", ("tc", "qdisc", "add", "dev", "vb", *SWALLOW), ("tc", "qdisc", "del", "dev", "vb", "root")),
    "deaf node": ("a", ("tc", "qdisc", "add", "dev", "va", *SWALLOW), ("tc", "qdisc", "del", "dev", "va", "root")),
}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with two_machines(tmp_path_factory.mktemp("partition"), door="line") as made:
        import tiny

        tiny.write_model(made.folder / "llama")
        write_rows(made.folder / "rows.jsonl")
        yield made


@pytest.fixture(scope="module")
def golden(machines: Machines) -> Path:
    words = ["--model", machines.folder / "llama", "--data", machines.folder / "rows.jsonl", *WORDS]
    done = fleetune("train", *words, "--gpus", "2", "--on", "local", "--run", "golden", cwd=machines.folder)
    assert done.returncode == 0, done.stderr
    return machines.folder / "golden"


def start(machines: Machines, run: str, *more: str) -> subprocess.Popen[str]:
    words = ["train", "--model", machines.folder / "llama", "--data", machines.folder / "rows.jsonl", *WORDS, *more]
    words += ["--on", "ssh", "--hosts", ",".join(ADDRESSES.values()), "--run", machines.runs / run]
    return machines.start_command(sys.executable, "-m", "fleetune.cli.main", *map(str, words))


def rows(machines: Machines, run: str, name: str) -> list[dict[str, Any]]:
    """Whole lines of a file of a run on the driver's machine; none where it is not there yet."""
    done = subprocess.run(machines.within("a", "cat", machines.runs / run / name), capture_output=True, text=True, check=False)
    return [json.loads(line) for line in done.stdout[: done.stdout.rfind("\n") + 1].splitlines()]


def steps(machines: Machines, run: str) -> int:
    return max((row["step"] for row in rows(machines, run, "ledger.jsonl")), default=0)


def failures_of(machines: Machines, run: str) -> list[dict[str, Any]]:
    return [row for row in rows(machines, run, "events.jsonl") if row["event"] == "failure"]


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float, what: str) -> Any:
    """The condition's value as soon as it holds, within so many seconds of a quiet machine."""
    deadline = time.monotonic() + seconds * PATIENCE
    while not (value := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return value


@pytest.mark.parametrize("name", BREAKS)
def test_it_is_found_in_time_and_the_other_side_commits_nothing(machines: Machines, golden: Path, name: str) -> None:
    run, (side, to_break, to_mend) = name.replace(" ", "-"), BREAKS[name]
    process = start(machines, run)
    try:
        wait_for(lambda: steps(machines, run) >= 20, process, 60, "steps")
        machines.network(side, *to_break)
        broken = time.monotonic()
        try:
            failures = wait_for(
                lambda: [row for row in rows(machines, run, "events.jsonl") if row["event"] == "failure"],
                process,
                30,
                "a failure",
            )
            found_s = time.monotonic() - broken
            assert f"node 1 ({ADDRESSES['b']}) is lost" in failures[0]["cause"], failures[0]
            assert found_s < 10 * PATIENCE, found_s
            wait_for(lambda: not machines.processes("b"), process, 15, "the end of the other side")
            assert not [entry for entry in machines.listing("b", machines.runs / run / "checkpoints") if "tmp" not in entry]
        finally:
            machines.network(side, *to_mend)
        out, said = process.communicate(timeout=120 * PATIENCE)
        assert process.returncode == 0, out + said
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    effective = {row["step"]: row["loss_hex"] for row in rows(machines, run, "ledger.jsonl")}
    assert [effective[step] for step in sorted(effective)] == losses(golden)
    verified = machines.fleetune("verify", machines.runs / run, "--against", golden, "--bitwise")
    assert verified.returncode == 0 and "lost 0, repeated 0" in verified.stdout, verified.stdout + verified.stderr
    assert not machines.processes("a") and not machines.processes("b")
    print(f"\n{name}: found after {found_s:.1f} s")
