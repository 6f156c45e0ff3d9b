"""One run of `fleetune train` as a person starts it, watched: what every measurement is made of."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.bench.figures import Figures, Step
from fleetune.bench.process_tree import run_watched
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_lines


@dataclass(frozen=True)
class Asked:
    """What is measured. processes, threads: fleetune's. repeats: how often each kind of run is made. flags: more words of
    `fleetune train`. against: the rival, or None. link_mbit: of a slow link between the processes, or None.
    random_parameters: of a model with random weights in the place of the model's own, or None."""

    model: str
    data: tuple[str, ...]
    method: str
    rank: int
    sequence_length: int
    steps: int
    repeats: int
    processes: int
    threads: int
    precision: str = "auto"
    against: str | None = "trl"
    learning_rate: float = 2e-4
    global_batch_size: int = 2
    flags: tuple[str, ...] = ()
    link_mbit: int | None = None
    random_parameters: int | None = None

    @property
    def cores(self) -> int:
        return self.processes * self.threads


def train_command(asked: Asked, run: Path, *, steps: int, is_launched: bool = False) -> list[str]:
    """is_launched: each process is started by somebody else, as torchrun does."""
    words = ["train", "--model", asked.model, "--method", asked.method, "--sequence-length", asked.sequence_length]
    for data in asked.data:
        words += ["--data", data]
    if asked.method != "full":
        words += ["--lora-rank", asked.rank, "--lora-alpha", 2 * asked.rank]
    words += [] if is_launched else ["--gpus", asked.processes]
    words += ["--threads", asked.threads, "--precision", asked.precision]
    words += ["--global-batch-size", asked.global_batch_size, "--micro-batch-size", 1, "--max-steps", steps, "--run", run]
    words += ["--learning-rate", asked.learning_rate, "--schedule", "constant", "--warmup", 0, "--log-level", "warning"]
    return [sys.executable, "-m", "fleetune.cli.main", *map(str, words), *asked.flags]


def prepare(asked: Asked, run: Path) -> RunFolder:
    """One step, so that no measured run pays for converting weights and tokenising rows."""
    log = run.with_suffix(".log")
    watched = run_watched(train_command(asked, run, steps=1), log=log, environment={})
    if watched.exit_code:
        raise UserError(f"fleetune train ended with {watched.exit_code}: {last_line(log)}")
    return RunFolder(run)


def run_fleetune(asked: Asked, run: Path) -> Figures:
    """Raises UserError where it fails."""
    log = run.with_suffix(".log")
    began = time.time()
    watched = run_watched(train_command(asked, run, steps=asked.steps), log=log, environment={})
    if watched.exit_code:
        raise UserError(f"fleetune train ended with {watched.exit_code}: {last_line(log)}")
    return figures_of(RunFolder(run), f"processes {asked.processes}, threads {asked.threads}", began, watched.peak_bytes)


def figures_of(folder: RunFolder, settings: str, began: float, peak_bytes: int) -> Figures:
    """Of a run that has ended. began: when its command was given, in seconds since 1970."""
    rows = [row for row in read_lines(folder.metrics) if "loss" in row]
    (begun,) = [row for row in read_lines(folder.events) if row["event"] == "start" and "ranks" in row]
    before = max(rank["memory_before_loading"] for rank in begun["ranks"])
    return Figures(
        "fleetune",
        settings,
        steps_of(rows, began),
        rows[0]["time"] - began,
        peak_bytes,
        rank_memory_bytes=max(row["peak_memory_bytes"] for row in rows),
        rank_memory_before_bytes=before,
        bytes_sent_per_step=rows[-1]["bytes_sent"],
    )


def steps_of(rows: Sequence[dict[str, Any]], began: float) -> tuple[Step, ...]:
    """A step takes from the end of the one before to its own end: whatever happens in between is part of training."""
    ends = [began, *(row["time"] for row in rows)]
    return tuple(
        Step(row["loss"], row["tokens"], row["trained_tokens"], end - start) for row, start, end in zip(rows, ends, ends[1:])
    )


def machine() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("fleetune", "torch", "transformers", "peft", "trl"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "versions": versions}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
