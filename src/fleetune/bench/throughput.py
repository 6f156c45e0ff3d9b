"""fleetune beside TRL: the same model, rows, trained tokens, adapter, global batch and optimizer, in turns, in one run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.bench.figures import Figures, Spread
from fleetune.bench.process_tree import run_watched
from fleetune.bench.table import grid, heading
from fleetune.bench.training_run import Asked, last_line, machine, prepare, run_fleetune, steps_of
from fleetune.data.store import TokenStore
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_json

#: What TRL is tried with: the best that were found for it on CPUs, packed without padding, and padded batches.
TRL_SETTINGS = ({"batch": 2, "packing": True}, {"batch": 8, "packing": False})


_COLUMNS = ("program", "tokens/s", "trained tokens/s", "peak memory, GB", "first step after, s", "last loss")


@dataclass(frozen=True)
class Report:
    """runs: every run in the order it was made. limit_tokens_per_s: what the matrix products alone allow; limit_flops_per_s:
    their speed. best: the rival's setting that the ratios are taken against."""

    asked: Asked
    machine: dict[str, Any]
    runs: tuple[Figures, ...]
    limit_tokens_per_s: float
    limit_flops_per_s: float

    def of(self, program: str, settings: str | None = None) -> list[Figures]:
        return [run for run in self.runs if run.program == program and settings in (None, run.settings)]

    @property
    def best(self) -> str | None:
        """The rival's fastest setting."""
        speeds = {run.settings: Spread.of([one.tokens_per_s for one in self.of("trl", run.settings)]) for run in self.of("trl")}
        return max(speeds, key=lambda settings: speeds[settings].median) if speeds else None

    @property
    def share_of_matmul_limit(self) -> float:
        return Spread.of([run.tokens_per_s for run in self.of("fleetune")]).median / self.limit_tokens_per_s

    def ratio(self, figure: Callable[[Figures], float]) -> float | None:
        """fleetune divided by the rival, medians of each."""
        if self.best is None:
            return None
        ours, theirs = self.of("fleetune"), self.of("trl", self.best)
        return Spread.of([figure(run) for run in ours]).median / Spread.of([figure(run) for run in theirs]).median

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "asked": vars(self.asked),
            "ratio": {
                "tokens_per_s": self.ratio(lambda run: run.tokens_per_s),
                "peak_memory": self.ratio(lambda run: run.peak_memory_bytes),
                "time_to_first_step": self.ratio(lambda run: run.first_step_s),
                "against": self.best,
            },
            "matmul_limit": {"tokens_per_s": self.limit_tokens_per_s, "flops_per_s": self.limit_flops_per_s},
            "share_of_matmul_limit": self.share_of_matmul_limit,
            "runs": [run.to_json() for run in self.runs],
        }

    def lines(self) -> list[str]:
        """One row a program and setting, medians with (smallest to largest), then the ratios."""
        kinds = dict.fromkeys((run.program, run.settings) for run in self.runs)
        rows = [_row_of(f"{program}, {settings}", self.of(program, settings)) for program, settings in kinds]
        rows.append(["matrix products alone", f"{self.limit_tokens_per_s:.0f}"])
        end = ["", f"share of what matrix products alone allow: {100 * self.share_of_matmul_limit:.0f} %"]
        if self.best is not None:
            speed, memory = self.ratio(lambda run: run.tokens_per_s), self.ratio(lambda run: run.peak_memory_bytes)
            end.append(f"against TRL, {self.best}: {speed:.2f} x the speed, {memory:.2f} x the memory")
        return [*heading(self.asked, self.machine), *grid(_COLUMNS, rows), *end]


def _row_of(name: str, runs: list[Figures]) -> list[str]:
    return [
        name,
        Spread.of([run.tokens_per_s for run in runs]).text(),
        Spread.of([run.trained_tokens_per_s for run in runs]).text(),
        Spread.of([float(run.peak_memory_bytes) for run in runs]).text(1e9, 1),
        Spread.of([run.first_step_s for run in runs]).text(digits=1),
        f"{runs[-1].steps[-1].loss:.3f}",
    ]


def measure(asked: Asked, folder: Path, *, tell: Callable[[str], None]) -> Report:
    """Measure, with everything that is written in `folder` (new or empty). Raises UserError where a program fails."""
    folder.mkdir(parents=True, exist_ok=True)
    tell("preparing: weights and rows, so that no run pays for them")
    prepared = prepare(asked, folder / "prepared")
    runs = []
    for number in range(asked.repeats):
        tell(f"round {number + 1} of {asked.repeats}: fleetune")
        runs.append(run_fleetune(asked, folder / f"fleetune-{number}"))
        for settings in TRL_SETTINGS if asked.against == "trl" else ():
            tell(f"round {number + 1} of {asked.repeats}: TRL, {named(settings)}")
            runs.append(run_trl(asked, folder, prepared, settings, f"trl-{number}-{named(settings).replace(' ', '-')}"))
    tell("matrix products alone")
    tokens_per_s, flops_per_s = limit(asked, read_json(prepared.prepared))
    return Report(asked, machine(), tuple(runs), tokens_per_s, flops_per_s)


def run_trl(asked: Asked, folder: Path, prepared: RunFolder, settings: dict[str, Any], name: str) -> Figures:
    out, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    store = TokenStore.open(Path(read_json(prepared.prepared)["store"]))
    values = {
        "steps": asked.steps, "batch": settings["batch"], "rank": asked.rank, "sequence-length": asked.sequence_length,
        "threads": asked.cores, "learning-rate": asked.learning_rate, "method": asked.method,
        "rows": rows_needed(store, asked.steps * settings["batch"], packing=settings["packing"]),
    }  # fmt: skip
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "fleetune.bench.trl_run", str(prepared.path), str(out), *words]
    command += ["--packing"] if settings["packing"] else []
    began = time.time()
    watched = run_watched(command, log=log, environment={"OMP_NUM_THREADS": str(asked.cores), "HF_HUB_OFFLINE": "1"})
    if watched.exit_code:
        raise UserError(f"TRL ended with {watched.exit_code}: {last_line(log)} (install fleetune[bench])")
    share = store.num_trained_tokens / store.num_tokens
    rows = [{**row, "trained_tokens": round(share * row["tokens"])} for row in map(json.loads, out.read_text().splitlines())]
    return Figures("trl", named(settings), steps_of(rows, began), rows[0]["time"] - began, watched.peak_bytes)


def rows_needed(store: TokenStore, sequences: int, *, packing: bool) -> int:
    """Rows that fill so many sequences; TRL tokenises and packs all that it is given before its first step."""
    if not packing:
        return sequences
    return math.ceil(1.1 * sequences * store.num_documents / store.num_sequences)


def limit(asked: Asked, prepared: dict[str, Any]) -> tuple[float, float]:
    """(tokens/s, FLOP/s) of matrix products alone, with the same processes x threads, all at once."""
    store = TokenStore.open(Path(prepared["store"]))
    share = store.num_trained_tokens / store.num_tokens
    command = [sys.executable, "-m", "fleetune.bench.matmul_limit", prepared["model_folder"], "--method", asked.method]
    command += ["--trained-share", str(share), "--precision", prepared["precision"], "--threads", str(asked.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(asked.processes)]
    found = [json.loads(process.communicate()[0]) for process in processes]
    return sum(one["tokens_per_s"] for one in found), sum(one["flops_per_s"] for one in found)


def named(settings: dict[str, Any]) -> str:
    return f"packed {settings['batch']}" if settings["packing"] else f"padded {settings['batch']}"
