"""Which process a number means: the system gives a number again after a process has ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """A process, told from a later one of the same number. mark: None for one that was dead when it was identified."""

    pid: int
    mark: str | None

    @staticmethod
    def of(pid: int) -> Identity:
        return Identity(pid, process_mark(pid))

    @property
    def lives(self) -> bool:
        return self.mark is not None and process_mark(self.pid) == self.mark

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it lives."""
        if self.lives:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def process_mark(pid: int) -> str | None:
    """What tells a live process from a later one with the same number; None where there is no live one.

    On Linux the boot and the ticks since it, which no change of the clock moves. A zombie has ended.
    """
    if sys.platform.startswith("linux"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else f"{_boot()}:{fields[19]}"
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.Error:
        return None


@lru_cache(maxsize=1)
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def wait_until_dead(processes: Sequence[Identity], seconds: float) -> list[Identity]:
    """Wait at most so long until none of these processes lives; returns those that still do."""
    deadline = time.monotonic() + seconds
    while True:
        living = [process for process in processes if process.lives]
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(0.02)
