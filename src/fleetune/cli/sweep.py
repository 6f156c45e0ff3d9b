"""A SWEEP.yaml: several runs that are to be compared, each checked before the first one starts."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetune.cli.intent import work_out
from fleetune.cli.smoke import refusal
from fleetune.spec.declared import declared
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.given import Source
from fleetune.spec.yaml_file import read_yaml

_KEYS = {
    "runs": "the runs by name, each with its settings",
    "common": "settings of all of them",
    "grid": "settings with a list of values each: every combination is a run",
    "gpus": "processes of each run",
    "at_once": "how many runs at the same time",
    "folder": "where the run folders go",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Candidate:
    """One run of a sweep. values: its settings by name of the spec's fields."""

    name: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """gpus: processes of each run. at_once: runs at the same time, None: as many as there are devices for."""

    folder: Path
    candidates: tuple[Candidate, ...]
    gpus: int = 1
    at_once: int | None = None
    problems: tuple[str, ...] = field(default=())


def read_sweep(path: Path) -> Sweep:
    """The sweep in a YAML file, every run worked out once. Raises one UserError with all problems, each with its run's name."""
    document = read_yaml(path)
    problems = [_unknown(path, name) for name in document if name not in _KEYS]
    common = _mapping(document, "common", problems)
    candidates = []
    named = _mapping(document, "runs", problems)
    grid = list(_combinations(_mapping(document, "grid", problems), problems))
    for name, values in named.items() if named else [("", {})]:
        if not isinstance(values, dict):
            problems.append(f"the run {name!r} is {values!r}: write its settings as `name: value` lines below it")
            continue
        for suffix, combination in grid:
            whole = "-".join(part for part in (name, suffix) if part)
            if whole:
                candidates.append(Candidate(whole, {**common, **values, **combination}))
    if not candidates:
        problems.append(f"{path} names no runs: write `runs:` with a name and settings each, or `grid:` with lists of values")
    problems += [
        f"{path}: the run {candidate.name!r} needs a plain name: letters, digits, dots, hyphens and underscores"
        for candidate in candidates
        if not _NAME.fullmatch(candidate.name)
    ]
    gpus, at_once = (_number(document, name, problems) for name in ("gpus", "at_once"))
    raise_if_any(problems)
    folder = Path(str(document.get("folder") or Path("runs") / path.stem)).absolute()
    sweep = Sweep(folder, tuple(candidates), gpus or 1, at_once)
    raise_if_any([problem for candidate in candidates for problem in _problems(sweep, candidate)])
    return sweep


def settings_of(sweep: Sweep, candidate: Candidate) -> dict[str, Any]:
    """What the run is started with: its own settings, its processes, and its folder, to be gone on with if it is there."""
    values = {"gpus": sweep.gpus, **candidate.values}
    return {**values, "run": str(sweep.folder / candidate.name), "resume": True}


def _problems(sweep: Sweep, candidate: Candidate) -> Iterator[str]:
    if (sweep.folder / candidate.name / "summary.json").is_file():
        return
    if candidate.values.get("smoke"):
        yield f"run {candidate.name}: {refusal('a sweep')}"
        return
    try:
        work_out(Source("file", settings_of(sweep, candidate), name=f"run {candidate.name}"))
    except UserError as error:
        for problem in error.problems:
            yield f"run {candidate.name}: {problem}"


def _unknown(path: Path, name: str) -> str:
    near = difflib.get_close_matches(name, _KEYS, n=1)
    if not near and name in declared():
        return f"{path}: {name} is a setting of a run: write it under `common:` or under a run's name"
    hint = f"did you mean {near[0]}?" if near else f"a sweep has {', '.join(_KEYS)}"
    return f"{path} has the key {name!r}, which no sweep has: {hint}"


def _mapping(document: Mapping[str, Any], name: str, problems: list[str]) -> dict[str, Any]:
    value = document.get(name) or {}
    if not isinstance(value, dict):
        problems.append(f"{name} is {value!r}: write {_KEYS[name]}, as `name: value` lines below it")
        return {}
    return value


def _number(document: Mapping[str, Any], name: str, problems: list[str]) -> int | None:
    value = document.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        problems.append(f"{name} {value!r} is no number of {_KEYS[name]}: give 1 or more")
        return None
    return value


def _combinations(grid: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, settings) of every combination; one without a name where there is no grid."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in grid.items()}
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values))
        yield "-".join(f"{name}-{_plain(value)}" for name, value in chosen.items()), chosen


def _plain(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", f"{value:g}" if isinstance(value, float) else os.path.basename(str(value))).strip(
        "-"
    )
