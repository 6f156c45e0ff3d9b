"""Run folders with tiny workers, and looking at their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetune.launch.identity import process_mark
from fleetune.launch.request import Commands, Launch, Patience
from fleetune.launch.supervisor import supervise
from fleetune.spec.run_folder import RunFolder, read_lines

#: The code of this checkout and its tests, for processes that are started.
PYTHONPATH = f"{Path(__file__).resolve().parents[2] / 'src'}:{Path(__file__).resolve().parents[1]}"
#: Supervisors in processes of their own; the fixture `no_leftovers` ends those that a failed test has left.
STARTED: list[subprocess.Popen[str]] = []
#: Short enough for tests; the times are measured with real clocks.
PATIENCE = Patience(restarts=2, backoff_s=0.1, backoff_limit_s=1.0, peers_s=1.0, cleanup_s=1.5, save_s=20.0)


def tiny_launch(num_processes: int = 1, **changes: Any) -> Launch:
    commands = Commands(
        prepare="launch.tiny_prepare",
        worker="launch.tiny_worker",
        preload=(),
    )
    values = {"commands": commands, "patience": PATIENCE, "environment": {"PYTHONPATH": PYTHONPATH}, **changes}
    return Launch(num_processes=num_processes, **values)


@dataclass
class TinyRun:
    """A run folder whose workers behave as told."""

    folder: RunFolder
    said: list[str] = field(default_factory=list)
    polls: int = 0

    @staticmethod
    def make(path: Path, behaviour: dict[str, Any]) -> TinyRun:
        path.mkdir(parents=True)
        (path / "behaviour.json").write_text(json.dumps(behaviour))
        return TinyRun(RunFolder(path))

    def supervise(self, num_processes: int = 1, on_poll: Callable[[], None] = lambda: None, **changes: Any) -> int:
        """In this process."""

        def poll() -> None:
            self.polls += 1
            on_poll()

        return supervise(self.folder, tiny_launch(num_processes, **changes), on_poll=poll, say=self.said.append)

    def start(self, num_processes: int = 1, then: str = "ok") -> subprocess.Popen[str]:
        """In a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.starter", str(self.folder.path), str(num_processes), then],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        STARTED.append(process)
        return process

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.folder.events) if row["event"] == kind]

    def attempts(self) -> int:
        return len(self.events("start"))

    def has_stepped(self, attempt: int) -> bool:
        """Whether this attempt has made a step. The ledger alone may be there from the attempt before."""
        return any(row["attempt"] == attempt for row in read_lines(self.folder.ledger))

    def log(self, rank: int = 0, attempt: int = 0) -> str:
        return self.folder.log(rank, attempt).read_text()

    def pids(self) -> dict[str, int]:
        """Of the workers (and the preparation) that have ever run, by `ATTEMPT-RANK`."""
        found = {}
        for path in self.folder.path.glob("pid-*"):
            text = path.read_text()
            if text:
                found[path.name.removeprefix("pid-")] = int(text)
        return found

    def living(self) -> list[int]:
        """Every process of this run that lives: those that name its folder in their command line."""
        wanted = str(self.folder.path)
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if wanted.encode() in words and process_mark(int(entry.name)):
                    alive.append(int(entry.name))
        return alive

    def store_pids(self) -> list[int]:
        """Stores do not name the folder: those whose log lies in it."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == str(self.folder.logs / "store.log"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return [pid for pid in found if process_mark(pid)]


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The condition's value as soon as it holds. Fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
