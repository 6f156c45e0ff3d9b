"""What methods need: full fine-tuning, LoRA and QLoRA, each with and without gradient checkpointing, measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleetune.bench.figures import Figures, Spread
from fleetune.bench.random_model import write_random_model
from fleetune.bench.table import grid, heading
from fleetune.bench.training_run import Asked, machine, prepare, run_fleetune
from fleetune.spec.errors import UserError

METHODS = ("full", "lora", "qlora")
_COLUMNS = ("method", "checkpointing", "above the process itself, GB", "saved against full", "whole tree, GB", "tokens/s")


@dataclass(frozen=True)
class Row:
    """One method. failure: why it did not run here, as it said itself; there are no runs then."""

    method: str
    checkpointing: bool
    runs: tuple[Figures, ...]
    failure: str | None = None

    @property
    def own_bytes(self) -> int:
        """The most that the rank has needed, without mapped files, above what the process had before it loaded anything."""
        return max((run.rank_memory_bytes - run.rank_memory_before_bytes for run in self.runs), default=0)

    @property
    def tree_bytes(self) -> int:
        """The most of the whole process tree; mapped weights count."""
        return max((run.peak_memory_bytes for run in self.runs), default=0)


@dataclass(frozen=True)
class MemoryReport:
    asked: Asked
    machine: dict[str, Any]
    rows: tuple[Row, ...]

    def saving(self, row: Row) -> float | None:
        """Share of what full fine-tuning needs, with the same checkpointing, that this method does not; None where one of
        them did not run."""
        full = next(one for one in self.rows if one.method == "full" and one.checkpointing == row.checkpointing)
        return 1 - row.own_bytes / full.own_bytes if full.runs and row.runs else None

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "asked": vars(self.asked),
            "rows": [
                {
                    "method": row.method,
                    "gradient_checkpointing": row.checkpointing,
                    "rank_bytes_above_baseline": row.own_bytes,
                    "peak_memory": row.tree_bytes,
                    "saving": self.saving(row),
                    "failure": row.failure,
                    "runs": [run.to_json() for run in row.runs],
                }
                for row in self.rows
            ],
        }

    def lines(self) -> list[str]:
        return [*heading(self.asked, self.machine), *grid(_COLUMNS, map(self._cells, self.rows))]

    def _cells(self, row: Row) -> list[str]:
        checkpointing = "yes" if row.checkpointing else "no"
        if row.failure is not None:
            return [row.method, checkpointing, f"did not run: {row.failure[:200]}"]
        saving = self.saving(row)
        return [
            row.method,
            checkpointing,
            f"{row.own_bytes / 1e9:.2f}",
            "" if row.method == "full" or saving is None else f"{100 * saving:.0f} %",
            f"{row.tree_bytes / 1e9:.2f}",
            Spread.of([run.tokens_per_s for run in row.runs]).text(),
        ]


def measure(asked: Asked, folder: Path, *, tell: Callable[[str], None]) -> MemoryReport:
    """Measure every method with micro-batches of one sequence. What fails is a row that says why."""
    folder.mkdir(parents=True, exist_ok=True)
    if asked.random_parameters is not None:
        tell("writing a model of random weights")
        asked = replace(asked, model=str(write_random_model(asked.model, asked.random_parameters, folder / "model")))
    asked = replace(asked, processes=1, global_batch_size=1)
    kinds = [(method, checkpointing) for checkpointing in (True, False) for method in METHODS]
    rows = []
    for method in METHODS:
        tell(f"preparing: weights and rows for {method}")
        with suppress(UserError):  # the runs themselves will say so
            prepare(replace(asked, method=method, flags=("--gradient-checkpointing",)), folder / f"prepared-{method}")
    for method, checkpointing in kinds:
        name = f"{method}{'-checkpointed' if checkpointing else ''}"
        flags = ("--gradient-checkpointing",) if checkpointing else ()
        runs: list[Figures] = []
        failure = None
        try:
            for number in range(asked.repeats):
                tell(f"round {number + 1} of {asked.repeats}: {name}")
                runs.append(run_fleetune(replace(asked, method=method, flags=flags), folder / f"{name}-{number}"))
        except UserError as error:  # what does not fit here is a result too
            runs, failure = [], str(error)
            tell(failure)
        rows.append(Row(method, checkpointing, tuple(runs), failure))
    return MemoryReport(asked, machine(), tuple(rows))
