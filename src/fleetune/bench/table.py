"""A report as a table for a person, and for the README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fleetune.bench.training_run import Asked


def heading(asked: Asked, machine: dict[str, Any]) -> list[str]:
    """What was measured, and on what."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return [
        f"{asked.model}, {asked.method}, sequences of {asked.sequence_length}, {asked.steps} steps, {asked.repeats} rounds",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}; {versions}",
        "",
    ]


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown. A row with fewer cells than there are columns is filled with empty ones."""
    filled = ([*row, *[""] * (len(columns) - len(row))] for row in rows)
    return [_line(columns), "|" + "---|" * len(columns), *map(_line, filled)]


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
