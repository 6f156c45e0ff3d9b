"""What every journey needs: the command as a person runs it, and small data of the real shapes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: Small enough for seconds, long enough for several steps and epochs.
SMALL = ["--sequence-length", "64", "--global-batch-size", "4", "--learning-rate", "1e-2", "--precision", "fp32"]


def fleetune(*words: str | Path, cwd: Path, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `fleetune ...` in a process of its own; never raises on a bad exit."""
    command = [sys.executable, "-m", "fleetune.cli.main", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment_of(environment), text=True, capture_output=True, timeout=timeout)


def start(*words: str | Path, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fleetune.cli.main", *map(str, words)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment_of(environment), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def environment_of(more: dict[str, str]) -> dict[str, str]:
    source = Path(__file__).resolve().parents[2] / "src"
    return {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def write_rows(path: Path, num_rows: int = 48, *, first: int = 0) -> Path:
    """Question and answer rows, all different, short, and easy to learn."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(first, first + num_rows):
            row = {"question": f"How many clips are {number} and {number % 7}?", "answer": f"{number + number % 7} clips."}
            file.write(json.dumps(row) + "\n")
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def losses(run: Path) -> list[str]:
    """The effective ledger's losses, exact, in the order of the steps."""
    rows = {row["step"]: row["loss_hex"] for row in rows_of(run / "ledger.jsonl")}
    return [rows[step] for step in sorted(rows)]


def samples(run: Path) -> list[list[str]]:
    rows = {row["step"]: row["samples"] for row in rows_of(run / "ledger.jsonl")}
    return [rows[step] for step in sorted(rows)]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str], timeout: float = 120) -> None:
    """Return when the run has written step `step` into its metrics. Raises AssertionError when it ends before."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        metrics = run / "metrics.jsonl"
        if metrics.exists() and any(row.get("step", 0) >= step and "loss" in row for row in complete_rows(metrics)):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"no step {step} after {timeout} s")


def complete_rows(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of everything that the command started, children of children too."""
    import psutil

    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def kill_everything(process: subprocess.Popen[str]) -> None:
    """Kill the command and all it started, at once, without a chance to save."""
    victims = workers_of(process)
    for pid in [process.pid, *victims]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()
