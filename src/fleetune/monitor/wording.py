"""Rows of the run folder as lines for a person. Pure text, without colour."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fleetune.monitor.figures import count, duration, memory, number, plural, printable, speed

Row = Mapping[str, Any]

#: What everybody should hear of, also where only warnings are wanted.
WARNINGS = {"failure", "restart", "resize", "save_failed", "skipped", "rewind", "lost", "hang", "out_of_memory", "gave_up"}
#: What is of use when something is looked for.
DETAILS = {"start", "stop", "done", "prepare", "prepared", "heartbeat", "first_step", "resized", "rehearsal"}

_ORIGIN = {"event", "attempt", "rank", "node", "time", "version", "step"}


def event_level(row: Row) -> int:
    """The `logging` level of an event. One with a `cause` that is not known by name is a warning."""
    kind = row.get("event")
    if kind in WARNINGS:
        return logging.WARNING
    if kind in DETAILS:
        return logging.DEBUG
    return logging.WARNING if row.get("cause") else logging.INFO


def event_line(row: Row) -> str:
    """An event in one line: what, in which step, why."""
    kind, step, cause = str(row.get("event", "event")), row.get("step"), row.get("cause")
    if kind == "save":
        waited = f", training waited {row['stall_s']:.2f} s" if row.get("in_background") else ""
        return f"saved step {step} ({memory(row.get('bytes') or 0)} in {duration(row.get('seconds') or 0.0)}{waited})"
    if kind == "save_failed":
        return f"warning: step {step} could not be saved, training goes on: {_line(cause)}"
    if kind == "early_stop":
        best = row.get("best_step")
        return f"stopped early at step {step}: the held-out loss was best at step {best} ({number(row.get('best_loss'))})"
    if kind == "restart":
        done = f"after step {step}" if step else "from the beginning"
        delay = f" in {duration(row['delay_s'])}" if row.get("delay_s") else ""
        return f"warning: starting again{delay}, going on {done}"
    if kind == "evaluating":
        so_far = f"{row['done']} of " if row.get("done") else ""
        return f"evaluating: {_line(row.get('what'))} ({so_far}{row.get('total')})"
    if kind == "recovered":
        return f"training again {duration(row.get('recovery_s') or 0.0)} after the failure was found"
    where = f" at step {step}" if step is not None else ""
    why = f": {_line(cause)}" if cause else ""
    rest = ", ".join(f"{key} {_line(value)}" for key, value in row.items() if key not in _ORIGIN and key != "cause")
    prefix = "warning: " if event_level(row) >= logging.WARNING else ""
    who = f" (rank {row['rank']})" if prefix and row.get("rank") is not None else ""
    return f"{prefix}{kind.replace('_', ' ')}{who}{where}{why}" + (f" ({rest})" if rest else "")


def step_line(row: Row, *, total_steps: int | None, tokens_per_s: float | None, time_left: float | None) -> str:
    """One step in one line."""
    of = f"/{total_steps}" if total_steps else ""
    parts = [
        f"step {row['step']}{of}",
        f"loss {number(row.get('loss'))}",
        f"learning rate {row.get('learning_rate') or 0.0:.2e}",
    ]
    if tokens_per_s is not None:
        parts.append(speed(tokens_per_s))
    if row.get("peak_memory_bytes"):
        parts.append(memory(row["peak_memory_bytes"]))
    if time_left is not None:
        parts.append(f"{duration(time_left)} left")
    return "  ".join(parts)


def validation_line(row: Row) -> str:
    return (
        f"step {row['step']}  held-out loss {number(row.get('validation_loss'))}  "
        f"perplexity {number(row.get('validation_perplexity'), 2)}"
    )


def final_line(row: Row | None, *, total_steps: int | None, seconds: float, tokens: int, num_restarts: int) -> str:
    """What was done, after the last step that was seen."""
    if row is None:
        return f"no step was made ({duration(seconds)})"
    of = f" of {total_steps}" if total_steps and row["step"] < total_steps else ""
    restarts = f", {plural(num_restarts, 'restart')}" if num_restarts else ""
    took = f"{duration(seconds)} from start to end"
    return f"{row['step']}{of} steps, {count(tokens)} tokens in {took}, last loss {number(row.get('loss'))}{restarts}"


def _line(value: Any) -> str:
    """A value in one line of printable text."""
    return printable(" ".join(str(value).split()))
