"""Being asked to stop: by Ctrl-C, a scheduler's notice, a closed terminal."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, final

#: Two interrupts closer than this are one: terminals and wrappers (make, srun) may deliver the same Ctrl-C twice.
_ONE_PRESS_S = 0.4


@final
class StopSignals:
    """While entered, signals are remembered instead of ending this process. Only works in the main thread; elsewhere
    Python's own rules stay, and nobody is asked.

    requested: name of the first signal that asked for a stop, or None. insisted: Ctrl-C came again.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.insisted = False
        self._requested_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                before = signal.getsignal(number)
                # Under nohup, SIGHUP is ignored: that was somebody's wish.
                if before is not None and not (number == signal.SIGHUP and before == signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested is None:
            self.requested, self._requested_at = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._requested_at > _ONE_PRESS_S:
            self.insisted = True
