"""Where records of a run go besides the run folder. One contract; each place is one file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fleetune.spec.run_folder import RunFolder

Row = Mapping[str, Any]


class Sink(Protocol):
    """A place that shows a run. Rank 0 calls it, from one thread, rows in the order they happen.

    Rows have the keys of `metrics.jsonl` and `events.jsonl`; a number that was not finite is None. A sink may raise: it is
    then told and left out, and training goes on.
    """

    def step(self, row: Row) -> None: ...

    def validation(self, row: Row) -> None: ...

    def event(self, row: Row) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def make_sinks(folder: RunFolder, *, tensorboard: bool, first_step: int) -> list[Sink]:
    """The sinks that were asked for. first_step: the step this attempt starts with (1 in a new run); what an earlier
    attempt showed from there on is replaced. Raises UserError where an optional package is missing."""
    sinks: list[Sink] = []
    if tensorboard:
        from fleetune.monitor.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(folder.tensorboard, first_step=first_step))
    return sinks
