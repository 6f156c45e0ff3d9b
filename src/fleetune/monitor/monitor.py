"""What happened, written down by rank 0: a row a step, the ledger, held-out results, events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from fleetune.monitor.logs import redact_values
from fleetune.monitor.rows import RowFile, finite
from fleetune.monitor.sinks import Sink
from fleetune.spec.run_folder import RunFolder

_log = logging.getLogger(__name__)


class Monitor:
    """Records one attempt of a run. Rank 0 only; `close` it at the end, whatever the end is.

    A row is with the system when the method returns: a process that is killed loses none. Nothing here raises because a disk
    is full or a sink fails. attempt: number of this start of the run, from 0. node: where rank 0 runs.
    """

    def __init__(self, folder: RunFolder, *, attempt: int, sinks: Sequence[Sink] = (), node: int = 0) -> None:
        self._attempt, self._node = attempt, node
        self._sinks = list(sinks)
        self._metrics = RowFile(folder.metrics)
        self._ledger = RowFile(folder.ledger)
        self._events = RowFile(folder.events)

    def record(self, row: Mapping[str, Any]) -> None:
        """One row of `metrics.jsonl` for one step: `step`, `loss`, `gradient_norm`, `learning_rate`, `tokens` and the rest.

        `attempt` and `time` (seconds since 1970) are added; a number that is not finite becomes null, with a note.
        """
        whole = finite({"attempt": self._attempt, **row, "time": _now()})
        self._metrics.append(whole)
        self._tell(lambda sink: sink.step(whole))

    def commit(self, row: Mapping[str, Any]) -> None:
        """One row of `ledger.jsonl` for one step that was made: `step`, `samples`, `trained_tokens`, `loss_hex`,
        `gradient_norm_hex`, `applied`."""
        self._ledger.append({"attempt": self._attempt, **row})

    def validation(self, step: int, loss: float, perplexity: float) -> None:
        """A held-out result after `step` steps: mean loss per trained token (nats), and exp of it."""
        whole = finite(
            {
                "attempt": self._attempt,
                "step": step,
                "validation_loss": loss,
                "validation_perplexity": perplexity,
                "time": _now(),
            }
        )
        self._metrics.append(whole)
        self._tell(lambda sink: sink.validation(whole))

    def event(self, kind: str, **fields: Any) -> None:
        """One row of `events.jsonl`: what (`kind`), which rank and node, when, and why (`cause`, `step`, ...)."""
        origin = {"event": kind, "attempt": self._attempt, "rank": 0, "node": self._node, "time": _now()}
        whole = finite({**origin, **redact_values(fields)})
        self._events.append(whole)
        self._tell(lambda sink: sink.event(whole))

    def flush(self) -> bool:
        """Bring all rows to the disk; call it before a checkpoint, whose steps must be in the ledger. False where it failed."""
        self.flush_sinks()
        return self.sync()

    def flush_sinks(self) -> None:
        """Only what the sinks still hold."""
        self._tell(lambda sink: sink.flush())

    def sync(self) -> bool:
        """Only the rows, to the disk; another thread may call it while this one records."""
        return all([file.sync() for file in (self._ledger, self._metrics, self._events)])

    def close(self) -> None:
        for file in (self._ledger, self._metrics, self._events):
            file.close()
        self._tell(lambda sink: sink.close())
        self._sinks.clear()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _tell(self, call: Callable[[Sink], None]) -> None:
        for sink in self._sinks[:]:
            try:
                call(sink)
            except Exception as error:  # somebody else's code, network or disk: a run must not end by it
                self._sinks.remove(sink)
                _log.warning("%s failed and gets no more records (the run folder has them): %s", type(sink).__name__, error)


def _now() -> float:
    return round(time.time(), 3)
