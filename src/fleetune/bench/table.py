"""A report as a table for a person, and for the README."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleetune.bench.figures import Figures, Spread
from fleetune.bench.training_run import Asked

if TYPE_CHECKING:
    from fleetune.bench.throughput import Report


def heading(asked: Asked, machine: dict[str, Any]) -> list[str]:
    """What was measured, and on what."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return [
        f"{asked.model}, {asked.method}, sequences of {asked.sequence_length}, {asked.steps} steps, {asked.repeats} rounds",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}; {versions}",
        "",
    ]


def lines_of(report: Report) -> list[str]:
    """Markdown: one row a program and setting, medians with (smallest to largest), then the ratios."""
    head = [
        *heading(report.asked, report.machine),
        "| program | tokens/s | trained tokens/s | peak memory, GB | first step after, s | last loss |",
        "|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((run.program, run.settings) for run in report.runs)
    rows = [row_of(f"{program}, {settings}", report.of(program, settings)) for program, settings in kinds]
    limit = f"| matrix products alone | {report.limit_tokens_per_s:.0f} | | | | |"
    end = ["", f"share of what matrix products alone allow: {100 * report.share_of_matmul_limit:.0f} %"]
    if report.best is not None:
        speed, memory = report.ratio(lambda run: run.tokens_per_s), report.ratio(lambda run: run.peak_memory_bytes)
        end.append(f"against TRL, {report.best}: {speed:.2f} x the speed, {memory:.2f} x the memory")
    return [*head, *rows, limit, *end]


def row_of(name: str, runs: list[Figures]) -> str:
    speed = Spread.of([run.tokens_per_s for run in runs]).text()
    trained = Spread.of([run.trained_tokens_per_s for run in runs]).text()
    memory = Spread.of([float(run.peak_memory_bytes) for run in runs]).text(1e9, 1)
    first = Spread.of([run.first_step_s for run in runs]).text(digits=1)
    return f"| {name} | {speed} | {trained} | {memory} | {first} | {runs[-1].steps[-1].loss:.3f} |"
