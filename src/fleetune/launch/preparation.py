"""The preparation of one machine, as a process that is watched to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from fleetune.launch.child import Call
from fleetune.launch.ending import describe_exit, first_error
from fleetune.launch.processes import LogTail, Process, Surroundings
from fleetune.launch.request import Launch
from fleetune.launch.stop import StopSignals
from fleetune.spec.run_folder import RunFolder


@final
class Preparation:
    """Started when it is made. Whoever made it kills it when it is not to outlive him."""

    def __init__(self, folder: RunFolder, launch: Launch, surroundings: Surroundings, log: Path) -> None:
        call = Call(launch.commands.prepare, (str(folder.path), *launch.prepare_arguments))
        self._log, self._tail = log, LogTail(log)
        self._cleanup_s = launch.patience.cleanup_s
        self._process = Process(call, log, surroundings)

    def follow(self, stop: StopSignals, *, beat: Callable[[], None], say: Callable[[str], None]) -> int | None:
        """Wait for its end, passing on what it says and when to stop; returns its exit code (negative: by that signal)."""
        deadline: float | None = None
        while self._process.exit_code is None:
            if stop.requested is not None and deadline is None:
                deadline = time.monotonic() + self._cleanup_s
                self._process.terminate()
            if stop.insisted or (deadline is not None and time.monotonic() > deadline):
                self._process.kill()
            beat()
            self._pass_on(say)
        self._pass_on(say)
        code = self._process.exit_code
        self._process.kill()  # whatever it may have started itself
        return code

    def failure(self) -> str:
        """Why it broke, where it did."""
        code = self._process.exit_code
        cause = (first_error(self._log) if code and code > 0 else None) or describe_exit(code)
        return f"the preparation failed: {cause}"

    def kill(self) -> None:
        self._process.kill()

    def _pass_on(self, say: Callable[[str], None]) -> None:
        for line in self._tail.new_lines():
            say(line)
