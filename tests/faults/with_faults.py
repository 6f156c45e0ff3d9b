"""The `fleetune` command with workers that break at a chosen place: `python -m faults.with_faults train ...`.

The workers are `faults.faulty_worker`, which the supervisor starts as it would start the real one: which module a worker is, is
a plain value of its request (`launch.request.Commands`). Nothing in the program itself knows of faults. What happens where is
in the variable FAULTS, a JSON list; see `faults.faulty_worker`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from journeys.journey import environment_of

TESTS = Path(__file__).resolve().parents[1]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "faults.with_faults", *map(str, words)]


def environment(faults: list[dict[str, Any]], **more: str) -> dict[str, str]:
    path = f"{TESTS.parent / 'src'}:{TESTS}"
    return {**environment_of(more), "PYTHONPATH": path, "FAULTS": json.dumps(faults)}


def fleetune_with(faults: list[dict[str, Any]], *words: str | Path, cwd: Path, timeout: float = 240, **more: str) -> Any:
    """Run `fleetune ...` with these faults; never raises on a bad exit."""
    return subprocess.run(
        command(*words), cwd=cwd, env=environment(faults, **more), text=True, capture_output=True, timeout=timeout
    )


def start_with(faults: list[dict[str, Any]], *words: str | Path, cwd: Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*words),
        cwd=cwd,
        env=environment(faults, **more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def main(words: list[str]) -> int:
    from fleetune.cli import main as cli
    from fleetune.cli import start
    from fleetune.launch.request import Commands

    assert "FAULTS" in os.environ
    usual = start._launch
    start._launch = lambda intent: replace(usual(intent), commands=Commands(worker="faults.faulty_worker"))
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
