"""What the supervisor writes into `events.jsonl`, and how a person hears of it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, final

from fleetune.launch.ending import Ending
from fleetune.spec.run_folder import RunFolder, append_line


@final
class Record:
    """The supervisor's rows. `elapsed_s` of each is measured since it began, by a clock that nobody sets.

    keeps False: for a node of several, whose driver writes for all.
    """

    def __init__(self, folder: RunFolder, *, keeps: bool = True) -> None:
        self._folder, self._keeps = folder, keeps
        self._began = time.monotonic()

    def event(self, what: str, attempt: int, ending: Ending | None, **more: Any) -> None:
        """One row. Of an ending, rank, node, step and cause are told. A full disk loses the row, not the run."""
        if not self._keeps:
            return
        elapsed_s = round(time.monotonic() - self._began, 3)
        row: dict[str, Any] = {"event": what, "attempt": attempt, "time": round(time.time(), 3), "elapsed_s": elapsed_s}
        if ending is not None:
            node = ending.node if ending.rank is not None else None
            row |= {"rank": ending.rank, "node": node, "step": ending.step, "cause": ending.cause or None}
        row |= more
        with suppress(OSError):
            append_line(self._folder.events, {key: value for key, value in row.items() if value is not None})
