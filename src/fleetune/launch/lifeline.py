"""The pipe that ties a process to its supervisor: when the supervisor is gone, in whatever way, the process ends.

The supervisor holds the only writing end and never writes. A process that was started with the reading end sees the end of
the file as soon as the supervisor is gone, even by kill -9. On Linux the kernel also kills a process whose parent dies; that
works without the interpreter, so a process that holds the lock of Python in a long call dies too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from typing import final

#: Names the reading end in the environment of every process of a run; absent where no supervisor of ours started it.
VARIABLE = "FLEETUNE_LIFELINE_FD"

_PR_SET_PDEATHSIG = 1
_watched_by: int | None = None


@final
class Lifeline:
    """The supervisor's side. `read_end` is to be inherited by the processes, `write_end` by nobody."""

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()

    def variables(self) -> dict[str, str]:
        """What a process needs in its environment to find the pipe."""
        return {VARIABLE: str(self.read_end)}

    def close(self) -> None:
        """Every process that still watches ends now."""
        os.close(self._write_end)
        os.close(self.read_end)


def watch(*, with_thread: bool = True) -> None:
    """End this process, at once and without cleaning up, when its supervisor is gone. Does nothing without a supervisor.

    Call it first, in the main thread; again after a fork, since neither the thread nor the kernel's promise is inherited.
    with_thread False: for a process that is about to fork; it depends on the kernel and on its children, who watch too.
    """
    global _watched_by
    text = os.environ.get(VARIABLE)
    if text is None or _watched_by == os.getpid():
        return
    _watched_by = os.getpid()
    pipe = int(text)
    os.set_inheritable(pipe, False)
    _die_with_parent()
    if select.select([pipe], [], [], 0)[0]:  # the parent died before the kernel was asked to tell
        os._exit(1)
    if with_thread:
        del os.environ[VARIABLE]  # a process that this one starts has another table of open files
        threading.Thread(target=_wait_for_end, args=(pipe,), name="lifeline", daemon=True).start()


def _wait_for_end(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.write(2, b"the supervisor is gone: this process ends\n")
    os._exit(1)


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends (prctl(2), Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
