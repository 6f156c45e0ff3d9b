"""The same training on 1, 2, ... processes: the article's table, and the same over a slow link."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleetune.bench.figures import Figures, Spread
from fleetune.bench.slow_link import environment, slow_link
from fleetune.bench.table import grid, heading
from fleetune.bench.training_run import Asked, figures_of, last_line, machine, prepare, run_fleetune, train_command
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder

_PORT = 29571
_COLUMNS = ("processes", "link", "tokens/s", "GB per device", "speed-up", "efficiency", "loss differs by", "MB sent a step")


@dataclass(frozen=True)
class Row:
    """One number of processes. link_mbit: what they talked over; None: this machine's own loopback."""

    processes: int
    link_mbit: int | None
    runs: tuple[Figures, ...]

    @property
    def tokens_per_s(self) -> Spread:
        return Spread.of([run.tokens_per_s for run in self.runs])

    @property
    def device_bytes(self) -> int:
        """The most that a process has needed, without mapped files."""
        return max(run.rank_memory_bytes for run in self.runs)

    @property
    def bytes_sent(self) -> int:
        return self.runs[-1].bytes_sent_per_step


@dataclass(frozen=True)
class ScalingReport:
    asked: Asked
    machine: dict[str, Any]
    rows: tuple[Row, ...]

    def speed_up(self, row: Row) -> float:
        return row.tokens_per_s.median / self.rows[0].tokens_per_s.median

    def efficiency(self, row: Row) -> float:
        return self.speed_up(row) / row.processes

    def loss_difference(self, row: Row) -> float:
        """The largest difference to the loss of one process in the same step; the batches are the same."""
        one = self.rows[0].runs[0].steps
        return max(abs(step.loss - other.loss) for run in row.runs for step, other in zip(run.steps, one, strict=True))

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "asked": vars(self.asked),
            "rows": [
                {
                    "processes": row.processes,
                    "link_mbit": row.link_mbit,
                    "tokens_per_s": row.tokens_per_s.median,
                    "memory_per_device": row.device_bytes,
                    "loss_difference": self.loss_difference(row),
                    "speed_up": self.speed_up(row),
                    "efficiency": self.efficiency(row),
                    "bytes_sent_per_step": row.bytes_sent,
                    "runs": [run.to_json() for run in row.runs],
                }
                for row in self.rows
            ],
        }

    def lines(self) -> list[str]:
        return [*heading(self.asked, self.machine), *grid(_COLUMNS, map(self._cells, self.rows))]

    def _cells(self, row: Row) -> list[str]:
        link = "loopback" if row.link_mbit is None else f"{row.link_mbit} Mbit/s"
        return [
            str(row.processes),
            "" if row.processes == 1 else link,
            row.tokens_per_s.text(),
            f"{row.device_bytes / 1e9:.2f}",
            f"{self.speed_up(row):.2f}",
            f"{100 * self.efficiency(row):.0f} %",
            f"{self.loss_difference(row):.1e}",
            f"{row.bytes_sent / 1e6:.1f}",
        ]


def measure(asked: Asked, folder: Path, *, tell: Callable[[str], None]) -> ScalingReport:
    """Measure 1 to `asked.processes` processes of `asked.threads` threads each, in turns, each with the same global batch.

    Raises UserError where a run fails, or a slow link is asked for and cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tell("preparing: weights and rows, so that no run pays for them")
    most = asked.processes
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    asked = replace(asked, global_batch_size=max(asked.global_batch_size, most))
    prepare(replace(asked, processes=1), folder / "prepared")
    kinds: list[tuple[int, int | None]] = [(size, None) for size in sizes]
    kinds += [(size, asked.link_mbit) for size in sizes if size > 1 and asked.link_mbit]
    found: dict[tuple[int, int | None], list[Figures]] = {kind: [] for kind in kinds}
    for number in range(asked.repeats):
        for size, mbit in kinds:
            over = f", {mbit} Mbit/s" if mbit else ""
            tell(f"round {number + 1} of {asked.repeats}: {size} processes{over}")
            run = folder / f"run-{number}-{size}{'-slow' if mbit else ''}"
            one = replace(asked, processes=size)
            found[size, mbit].append(run_over_link(one, run, mbit) if mbit else run_fleetune(one, run))
    return ScalingReport(asked, machine(), tuple(Row(size, mbit, tuple(found[size, mbit])) for size, mbit in kinds))


def run_over_link(asked: Asked, run: Path, mbit: int) -> Figures:
    """One process a place, started as torchrun would on as many machines. Raises UserError where one fails."""
    command = train_command(asked, run, steps=asked.steps, is_launched=True)
    began = time.time()
    with slow_link(asked.processes, mbit) as places:
        logs = [run.with_name(f"{run.name}-rank-{rank}.log") for rank in range(asked.processes)]
        processes = []
        for rank, (place, log) in enumerate(zip(places, logs, strict=True)):
            told = {**os.environ, **environment(places, rank, _PORT), "OMP_NUM_THREADS": str(asked.threads)}
            with open(log, "wb") as output:
                words = [*place.words, *command]
                processes.append(subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=told))
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
    for code, log in zip(codes, logs, strict=True):
        if code:
            raise UserError(f"fleetune train ended with {code}: {last_line(log)}")
    return figures_of(RunFolder(run), f"processes {asked.processes}, {mbit} Mbit/s", began, peak_bytes=0)
