"""A request to stop, from a scheduler, a supervisor or a person's Ctrl-C, kept until the loop asks for it."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """Set by SIGTERM, SIGINT or SIGUSR1; read by the loop at every step and between batches of an evaluation.

    The handler only sets a flag: saving inside a signal handler would save a step that is half done.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal_name = ""

    def install(self) -> StopRequest:
        """Take over the signals. Must be called in the main thread of the process."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._event.set()

    @property
    def requested(self) -> bool:
        return self._event.is_set()
