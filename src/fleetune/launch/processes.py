"""Processes started by argv, never by a shell: each in a session of its own, tied to us, writing into its own log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from fleetune.launch.child import Call
from fleetune.launch.lifeline import Lifeline


@dataclass(frozen=True)
class Surroundings:
    """What all processes of a run share: their environment, and the pipe that ties them to this one."""

    environment: Mapping[str, str]
    lifeline: Lifeline


@final
class Reports:
    """A pipe through which processes tell us things: one JSON object a line. They get its number as `--report-fd`."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self.write_end, False)  # no process may ever wait for a supervisor that is stopped
        self._pending = b""

    def started(self) -> None:
        """The processes have their copies: let go of ours, so that the pipe ends with them."""
        os.close(self.write_end)

    def take(self) -> list[dict[str, Any]]:
        """What has come since the last time. Never waits."""
        while True:
            try:
                piece = os.read(self._read_end, 65536)
            except BlockingIOError:
                break
            if not piece:
                break
            self._pending += piece
        *lines, self._pending = self._pending.split(b"\n")
        return [row for line in lines if isinstance(row := json.loads(line), dict)]

    def close(self) -> None:
        os.close(self._read_end)


@final
class Process:
    """One process of ours, and whatever it starts: they are one process group, which `kill` ends whole."""

    def __init__(
        self,
        call: Call,
        log: Path,
        surroundings: Surroundings,
        *,
        variables: Mapping[str, str] | None = None,
        reports: Reports | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        self.call, self.log = call, log
        words = call.argv()
        inherited = [surroundings.lifeline.read_end, *inherited]
        if reports is not None:
            words += ["--report-fd", str(reports.write_end)]
            inherited.append(reports.write_end)
        output = open_log(log)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "fleetune.launch.child", *words],
                stdin=subprocess.PIPE if call.waits else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**surroundings.environment, **(variables or {}), **surroundings.lifeline.variables()},
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C in the terminal must reach the supervisor alone
            )
        finally:
            os.close(output)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._popen.poll()

    def go(self, arguments: Sequence[str] = ()) -> None:
        """Let a process that waits begin, with these arguments after its own."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already, which is noticed where its exit code is looked at
            self._popen.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
            self._popen.stdin.close()

    def terminate(self) -> None:
        """Ask this process (not its children) to end."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything in its process group, now. Also right when it is dead already and its children are not."""
        with suppress(ProcessLookupError, PermissionError):  # macOS says PermissionError for a group of zombies
            os.killpg(self.pid, signal.SIGKILL)
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            with suppress(BrokenPipeError):
                self._popen.stdin.close()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for its end; whether it has ended."""
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def open_log(path: Path) -> int:
    """A descriptor that appends to a log that only its owner may read."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o600)


@final
class LogTail:
    """What is appended to a log from now on, by whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[str]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._position += end
        return data[:end].decode("utf-8", errors="replace").splitlines()
