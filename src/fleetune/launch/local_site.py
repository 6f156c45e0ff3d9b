"""Nodes that are this machine: their process is an ordinary child."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import final

from fleetune.launch.ending import describe_exit
from fleetune.launch.link import Link
from fleetune.launch.processes import open_log
from fleetune.launch.site import NODE_MODULE


@final
class LocalSite:
    """Starts a node's process on this machine."""

    def reach(self, host: str, log: Path) -> PipeConnection:
        return PipeConnection([sys.executable, "-m", NODE_MODULE], log)


@final
class PipeConnection:
    """A child process that is spoken to by its standard input and output. Ctrl-C in the terminal does not reach it."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self.log = log
        self._begins = log.stat().st_size if log.exists() else 0
        output = open_log(log)
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                start_new_session=True,
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
            )
        finally:
            os.close(output)
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self.link = Link(self._popen.stdout.fileno(), self._popen.stdin.fileno(), is_strict=False)

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    def said(self) -> list[str]:
        """The last lines that this process has written to its standard error."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(self._begins, self.log.stat().st_size - 8192))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [line.strip() for line in text.splitlines() if line.strip()]

    def failure(self) -> str | None:
        code = self._popen.poll()
        if code is not None:
            return f"its process {describe_exit(code)}; see {self.log}"
        if self.link.is_lost:
            return self.link.why_ended or f"nothing was heard of it for {self.link.silent_s:.0f} s"
        return None

    def close(self) -> None:
        self.link.close()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            self._popen.wait(8.0)  # it ends its own processes first
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(5.0)
