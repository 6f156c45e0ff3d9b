"""A run at one look: how far, how fast, its losses as a curve, its ranks, its machines, what went wrong. Plain lines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fleetune.monitor.figures import duration, memory, number, plural, printable, speed
from fleetune.monitor.throughput import Throughput
from fleetune.monitor.wording import event_level, event_line
from fleetune.spec.run_folder import RunFolder, effective_rows, read_json, read_lines

_BLOCKS = "▁▂▃▄▅▆▇█"
#: A rank that is this many steps behind the first one, or silent for so long, is told.
_BEHIND_STEPS, _SILENT_S = 2, 5.0
_WARNING = 30


def overview(folder: RunFolder, *, width: int = 78, num_events: int = 5) -> list[str]:
    """The lines. width: columns of the terminal. Raises nothing that the run folder could cause."""
    events = list(read_lines(folder.events))
    steps = list(effective_rows(folder.metrics).values())
    total = next((row["num_steps"] for row in reversed(events) if isinstance(row.get("num_steps"), int)), None)
    lines = [_head(folder, steps, events, total)]
    if steps:
        lines += [_figures(steps, total), *curve([row.get("loss") for row in steps], width)]
    lines += _ranks(folder)
    lines += _machines(folder)
    told = [row for row in events if event_level(row) >= _WARNING]
    lines += [printable(event_line(row))[:width] for row in told[-num_events:]]
    return lines


def is_over(folder: RunFolder) -> bool:
    """Whether nobody runs in the folder (any more)."""
    try:
        return read_json(folder.lease).get("holder") is None
    except (OSError, ValueError):
        return True


def curve(values: Sequence[float | None], width: int, height: int = 6) -> list[str]:
    """Values as a curve of blocks, `height` lines high, with its highest and lowest value; neighbours are averaged."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return []
    columns = max(1, min(len(known), width - 12))
    means = []
    for column in range(columns):
        part = known[len(known) * column // columns : len(known) * (column + 1) // columns]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    scale = (height * len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    levels = [round((mean - low) * scale) for mean in means]
    lines = []
    for line in reversed(range(height)):
        label = f"{high:9.4f}" if line == height - 1 else f"{low:9.4f}" if line == 0 else " " * 9
        marks = (level - line * len(_BLOCKS) for level in levels)
        text = "".join(" " if mark < 0 else _BLOCKS[min(mark, len(_BLOCKS) - 1)] for mark in marks)
        lines.append(f"{label}  {text}".rstrip())
    return lines


def _head(folder: RunFolder, steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], total: int | None) -> str:
    done = steps[-1]["step"] if steps else 0
    restarts = sum(row.get("event") == "restart" for row in events)
    state = "not running" if is_over(folder) else "running"
    of = f"/{total}" if total else ""
    return f"{folder.path.name}: step {done}{of}, {state}" + (f", {plural(restarts, 'restart')}" if restarts else "")


def _figures(steps: Sequence[Mapping[str, Any]], total: int | None) -> str:
    throughput = Throughput()
    for row in steps[-40:]:
        throughput.add(row.get("tokens") or 0, (row.get("step_s") or 0.0) + (row.get("data_wait_s") or 0.0))
    last = steps[-1]
    parts = [f"loss {number(last.get('loss'))}", f"learning rate {last.get('learning_rate') or 0.0:.2e}"]
    if throughput.tokens_per_s is not None:
        parts.append(speed(throughput.tokens_per_s))
    if last.get("peak_memory_bytes"):
        parts.append(memory(last["peak_memory_bytes"]))
    left = throughput.time_left(max(0, total - last["step"])) if total else None
    if left:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


def _ranks(folder: RunFolder) -> list[str]:
    """The slowest of the live ranks: the one furthest behind, or silent for the longest time."""
    states = []
    with suppress(OSError):
        for path in sorted(folder.heartbeat.glob("rank-*.json")):
            with suppress(OSError, ValueError):
                states.append(read_json(path))
    if len(states) < 2:
        return []
    first = max(int(state.get("step") or 0) for state in states)
    slowest = max(states, key=lambda state: (first - int(state.get("step") or 0), float(state.get("silent_s") or 0.0)))
    behind, silent = first - int(slowest.get("step") or 0), float(slowest.get("silent_s") or 0.0)
    if behind < _BEHIND_STEPS and silent < _SILENT_S:
        return [f"{plural(len(states), 'rank')}, none behind"]
    why = f"{plural(behind, 'step')} behind" if behind >= _BEHIND_STEPS else f"no sign of life for {silent:.0f} s"
    where = f"in {slowest.get('phase')} of step {slowest.get('step')}"
    return [f"slowest: rank {slowest.get('rank')} (node {slowest.get('node')}), {why}, {where}"]


def _machines(folder: RunFolder) -> list[str]:
    """The last row of each node's load."""
    last = {row["node"]: row for row in read_lines(folder.load) if isinstance(row.get("node"), int)}
    lines = []
    for node, row in sorted(last.items()):
        age = time.time() - float(row.get("time") or 0.0)
        parts = [
            f"CPU {row.get('cpu_percent', 0):.0f} %",
            f"memory {memory(row['memory_used_bytes'])} of {memory(row['memory_bytes'])}",
        ]
        for index, gpu in enumerate(row.get("gpus") or ()):
            parts.append(
                f"GPU {index} {gpu.get('load_percent', '?')} % {memory(gpu['used_bytes'])} of {memory(gpu['memory_bytes'])}"
            )
        if row.get("sent_bytes_per_s") is not None:
            parts.append(f"network {memory(row['sent_bytes_per_s'])}/s out")
        old = f" ({duration(age)} ago)" if age > 60 else ""
        lines.append(f"node {node} ({printable(str(row.get('host')))}): {', '.join(parts)}{old}")
    return lines
