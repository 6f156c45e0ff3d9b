"""A rank's signs of life. A thread tells the supervisor twice a second what the rank is doing.

The thread needs Python's lock: a rank that holds it in a call that never returns goes silent, as a stopped one does. A rank
that is stuck elsewhere goes on giving signs, but its step does not change. Nothing here ever waits for whoever reads: a sign
that does not fit into the pipe is dropped.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from contextlib import suppress
from typing import final

#: Names the writing end of the report pipe in the environment of a worker; absent where no supervisor of ours started it.
VARIABLE = "FLEETUNE_REPORT_FD"

#: Seconds between two signs of life.
INTERVAL_S = 0.5

#: Asks a process for the stacks of all its threads, in its log. It works without Python's lock, so in a stuck process too.
STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)


@final
class Pulse:
    """What this rank is doing. Every method only sets values: they cost nothing in a step."""

    def __init__(self) -> None:
        self._now: tuple[str, int, int] = ("start", 0, 0)
        self._steps_done = 0
        self._pipe: int | None = None
        self._rank = 0

    @staticmethod
    def begin(rank: int) -> Pulse:
        """Begin to give signs of life, where a supervisor of ours reads them; and prepare to show the stacks when asked."""
        pulse = Pulse()
        if STACKS_SIGNAL is not None:
            with suppress(OSError, ValueError, RuntimeError):  # there is no standard error
                faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
        text = os.environ.get(VARIABLE)
        if text is not None:
            pulse._pipe, pulse._rank = int(text), rank
            threading.Thread(target=pulse._beat, name="pulse", daemon=True).start()
        return pulse

    def at(self, phase: str, step: int | None = None) -> None:
        """The rank has come to `phase` (see `liveness.PHASES`), of step number `step` (from 1) where it is given."""
        _, before, marks = self._now
        self._now = (phase, before if step is None else step, marks + 1)

    def tick(self) -> None:
        """The rank gets on within its phase."""
        phase, step, marks = self._now
        self._now = (phase, step, marks + 1)

    def step_done(self) -> None:
        """A step was made. The first one of an attempt is told at once: with it the run is back at work."""
        self._steps_done += 1
        self.at("data")
        if self._steps_done == 1:
            self._tell()

    def _tell(self) -> bool:
        """Give a sign of life; False where nobody can hear it any more."""
        if self._pipe is None:
            return False
        phase, step, marks = self._now
        row = {"pulse": self._rank, "phase": phase, "step": step, "marks": marks, "done": self._steps_done}
        try:
            os.write(self._pipe, json.dumps(row).encode() + b"\n")
        except BlockingIOError:
            return True
        except OSError:
            return False  # the supervisor is gone: the lifeline ends this process
        return True

    def _beat(self) -> None:
        while self._tell():
            time.sleep(INTERVAL_S)
