"""The progress of a run, seen from the process that launched it: it only reads the run folder, and never imports torch."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from fleetune.monitor.figures import duration, memory, number, plural, speed
from fleetune.monitor.follow import RowFollower
from fleetune.monitor.throughput import Throughput
from fleetune.monitor.wording import event_level, event_line, final_line, step_line, validation_line
from fleetune.spec.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

Row = Mapping[str, Any]


class ProgressView:
    """Shows a run on `stream`: live on a terminal, one plain line a step elsewhere, warnings alone from level `warning` on.

    Call `poll` often (a few times a second) and `close` at the end. total_steps None: learnt from the run's start as soon as it
    is there. from_start: also show what is in the folder already (a watcher); else only what comes. every: of the plain lines,
    one every so many steps, and the last.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        stream: TextIO | None = None,
        total_steps: int | None = None,
        level: str = "info",
        from_start: bool = False,
        every: int = 1,
    ) -> None:
        self._folder = folder
        self._stream = sys.stderr if stream is None else stream
        self._total_steps = total_steps
        self._may_learn_total = total_steps is None
        self._every = every
        self._level: int = logging.getLevelName(level.upper())
        self._metrics = RowFollower(folder.metrics, from_start=from_start)
        self._events = RowFollower(folder.events, from_start=from_start)
        self._throughput = Throughput()
        self._started = time.monotonic()
        self._last: Row | None = None
        self._first_attempt: int | None = None
        self._num_restarts = 0
        self._tokens = 0
        self._live: Live | None = None
        self._closed = False
        if self._level <= logging.INFO and self._stream.isatty():
            self._start_live()

    def poll(self) -> None:
        """Show what happened since the last call. Raises nothing that the run folder could cause."""
        rows = [*self._metrics.new_rows(), *self._events.new_rows()]
        for row in sorted(rows, key=lambda row: row.get("time") or 0.0):
            if "event" in row:
                if self._may_learn_total and isinstance(row.get("num_steps"), int):
                    self._total_steps = row["num_steps"]
                self._say(event_level(row), event_line(row))
            elif "validation_loss" in row:
                self._say(logging.INFO, validation_line(row))
            elif "loss" in row and isinstance(row.get("step"), int):
                self._take_step(row)
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)

    def close(self) -> None:
        """Show the rest and a last line; the terminal is as it was before."""
        if self._closed:
            return
        self._closed = True
        try:
            self.poll()
        finally:
            if self._live is not None:
                self._live.stop()
                self._live = None
        seconds = time.monotonic() - self._started
        self._say(
            logging.INFO,
            final_line(
                self._last,
                total_steps=self._total_steps,
                seconds=seconds,
                tokens=self._tokens,
                num_restarts=self._num_restarts,
            ),
        )

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take_step(self, row: Row) -> None:
        attempt = row.get("attempt") or 0
        if self._first_attempt is None:
            self._first_attempt = attempt
        if attempt - self._first_attempt > self._num_restarts:
            self._num_restarts = attempt - self._first_attempt
            self._throughput.restart()
        self._throughput.add(row.get("tokens") or 0, (row.get("step_s") or 0.0) + (row.get("data_wait_s") or 0.0))
        self._tokens += row.get("tokens") or 0
        self._last = row
        if self._live is None and (row["step"] % self._every == 0 or row["step"] == self._total_steps):
            line = step_line(
                row,
                total_steps=self._total_steps,
                tokens_per_s=self._throughput.tokens_per_s,
                time_left=self._time_left(),
            )
            self._say(logging.INFO, line)

    def _time_left(self) -> float | None:
        if self._last is None or self._total_steps is None:
            return None
        return self._throughput.time_left(max(0, self._total_steps - self._last["step"]))

    def _say(self, level: int, line: str) -> None:
        if level < self._level:
            return
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._stream, flush=True)

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream)
        # Nothing of ours prints to stdout meanwhile: what others print there must stay as it is.
        self._live = Live(
            self._picture(),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=self._stream is sys.stderr,
            transient=True,
        )
        self._live.start(refresh=True)

    def _picture(self) -> Table:
        return picture(
            self._last,
            total_steps=self._total_steps,
            tokens_per_s=self._throughput.tokens_per_s,
            time_left=self._time_left(),
            num_restarts=self._num_restarts,
            waited_s=time.monotonic() - self._started,
        )


def picture(
    row: Row | None,
    *,
    total_steps: int | None,
    tokens_per_s: float | None,
    time_left: float | None,
    num_restarts: int,
    waited_s: float,
) -> Table:
    """The live display: a bar with the step, and below it the figures of the last step."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    if row is None:
        table.add_row(Text(f"before the first step, {duration(waited_s)}"))
        return table
    step = row["step"]
    head = Text(f"step {step}" + (f"/{total_steps}" if total_steps else ""), style="bold")
    left = Text(f"{duration(time_left)} left" if time_left is not None else "")
    bar = ProgressBar(total=total_steps, completed=step, width=30) if total_steps else Text("")
    table.add_row(head, bar, left)
    figures = [f"loss {number(row.get('loss'))}", f"learning rate {row.get('learning_rate') or 0.0:.2e}"]
    if tokens_per_s is not None:
        figures.append(speed(tokens_per_s))
    if row.get("peak_memory_bytes"):
        figures.append(memory(row["peak_memory_bytes"]))
    if num_restarts:
        figures.append(plural(num_restarts, "restart"))
    outer = Table.grid()
    outer.add_row(table)
    outer.add_row(Text("   ".join(figures)))
    return outer
