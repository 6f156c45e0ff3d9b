"""The supervisor's side of the process that forks workers: see `fleetune.launch.fork_server`."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

from fleetune.launch.child import Call
from fleetune.launch.identity import Identity
from fleetune.launch.processes import Process, Reports, Surroundings
from fleetune.spec.run_folder import RunFolder

_SERVER = "fleetune.launch.fork_server"

#: So soon after the end of a process its nursery has told how it ended.
_TELLS_WITHIN_S = 2.0


@final
class Nursery:
    """Imports once, then starts processes for every attempt of a run. It may die: then a new one must be made."""

    def __init__(self, folder: RunFolder, preload: tuple[str, ...], surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self.log = folder.logs / "nursery.log"
        self._preload = preload
        self._reports = Reports()
        self._control, theirs = socket.socketpair()
        arguments = (str(folder.path), "--control-fd", str(theirs.fileno()))
        call = Call(_SERVER, arguments, preload, single_threaded=True)
        self.process = Process(call, self.log, surroundings, reports=self._reports, inherited=(theirs.fileno(),))
        theirs.close()
        self._reports.started()
        self._started: dict[int, Forked] = {}
        self._count = 0

    @property
    def lives(self) -> bool:
        return self.process.exit_code is None

    def start(
        self, call: Call, log: Path, *, variables: Mapping[str, str] | None = None, reports: Reports | None = None
    ) -> Forked:
        """Ask for a process; it begins as soon as the imports are done.

        reports: it finds the number of that pipe in its environment, under `pulse.VARIABLE`."""
        self._count += 1
        forked = self._started[self._count] = Forked(self, self._count)
        request = {
            "number": self._count,
            "argv": Call(call.module, call.arguments, self._preload, single_threaded=call.single_threaded).argv(),
            "log": str(log),
            "reports": reports is not None,
            "variables": dict(variables or {}),
        }
        self._send(request, [reports.write_end] if reports is not None else [])
        return forked

    def look(self) -> None:
        """Learn what has become of the processes that were asked for."""
        for row in self._reports.take():
            number = row.get("forked", row.get("ended"))
            forked = self._started.get(number) if isinstance(number, int) else None
            if forked is not None:
                forked.learn(row)

    def let_go(self, forked: Forked) -> None:
        """The process has ended and is not asked about again: its number may be given to another."""
        if self._started.pop(forked.number, None) is not None:
            self._send({"reap": forked.number}, [])

    def close(self) -> None:
        self._control.close()
        self.process.kill()
        self.process.wait(5.0)
        self._reports.close()

    def _send(self, request: Mapping[str, object], pipes: list[int]) -> None:
        with suppress(OSError):  # it is dead, which is noticed where its life is asked for
            socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], pipes)


@final
class Forked:
    """A process that a nursery was asked to start, and whatever it starts: one process group, which `kill` ends whole.

    pid: None until it runs. exit_code: None while it runs, and for ever where its nursery can no longer tell.
    """

    def __init__(self, nursery: Nursery, number: int) -> None:
        self.number = number
        self.exit_code: int | None = None
        self._nursery = nursery
        self._identity: Identity | None = None
        self._dead_since: float | None = None

    @property
    def pid(self) -> int | None:
        return None if self._identity is None else self._identity.pid

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or can never begin."""
        if self.exit_code is not None:
            return True
        if self._identity is None or self._identity.lives:
            return self._identity is None and not self._nursery.lives
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if self._nursery.lives and now - self._dead_since < _TELLS_WITHIN_S:
            return False
        self._nursery.process.kill()  # it should have told long ago: it is stopped, or hangs
        return True

    def learn(self, row: Mapping[str, object]) -> None:
        """Take in what the nursery says of it."""
        if "pid" in row:
            self._identity = Identity.of(int(str(row["pid"])))
        else:
            self.exit_code = int(str(row["code"]))

    def kill(self) -> None:
        """End it and its process group, now; where it has not begun, its nursery is ended, so that it never does."""
        if self._identity is None:
            self._nursery.process.kill()
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._identity.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for its end; whether it has ended."""
        deadline = time.monotonic() + seconds
        while True:
            self._nursery.look()
            if self.is_over:
                self._nursery.let_go(self)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
