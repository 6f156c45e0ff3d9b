"""Running a program and watching the memory of it and of everything it starts."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_S = 0.05


@dataclass(frozen=True)
class Watched:
    """A program that has ended. peak_bytes: largest sum, over its whole tree, of PSS: shared pages count once (sampled every
    50 ms; RSS, and so an upper bound, where the system tells no PSS)."""

    exit_code: int
    peak_bytes: int
    seconds: float


def run_watched(command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> Watched:
    """Run `command` to its end with its output in `log`. Never raises for a bad exit."""
    began = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        sampler = _Sampler(process.pid)
        sampler.start()
        try:
            code = process.wait()
        finally:
            sampler.ended.set()
            sampler.join()
    return Watched(code, sampler.peak_bytes, time.monotonic() - began)


class _Sampler(threading.Thread):
    def __init__(self, pid: int) -> None:
        super().__init__(name="memory", daemon=True)
        self.ended = threading.Event()
        self.peak_bytes = 0
        self._root = psutil.Process(pid)

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, _bytes_of(self._root))


def _bytes_of(root: psutil.Process) -> int:
    try:
        members = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in members:
        try:
            memory = member.memory_full_info()
        except (psutil.Error, OSError):  # it has just ended
            continue
        total += getattr(memory, "pss", memory.rss)
    return total
