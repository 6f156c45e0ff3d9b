"""What may change when a run goes on. Each field says it of itself, where it is declared."""

from __future__ import annotations

import os
from typing import Any

from fleetune.spec.declared import Declared, declared
from fleetune.spec.errors import raise_if_any
from fleetune.spec.read import Resolved

#: What changes the last bits: with determinism strict it stays, whatever its field says.
_FIXED_IF_STRICT = ("micro_batch_size", "threads", "gradient_checkpointing", "device")


def check_resume(old: Resolved, new: Resolved) -> tuple[str, ...]:
    """Refuse, all at once, changes that would make it another run. Returns what a person should know of the others.

    old: the run as it was written down at its start. new: what is asked now.
    """
    before, after = old.spec.flat(), new.spec.flat()
    is_strict = before["determinism"] == after["determinism"] == "strict"
    raise_if_any(
        [
            f"{field.shown} was {_said(before[name])} ({old.origins[name]}) when the run began, and is now "
            f"{_said(after[name])} ({new.origins[name]}): leave it as it was, or begin a new run with another --run"
            for name, field in declared().items()
            if not (field.resume and not (is_strict and name in _FIXED_IF_STRICT))
            and name != "run"
            and not _same(field, before[name], after[name])
        ]
    )
    is_stopped_early = after["max_steps"] is not None and after["max_steps"] == before["max_steps"]
    if not is_stopped_early or before["epochs"] == after["epochs"]:
        return ()
    return (
        f"the run still ends after step {after['max_steps']} (max_steps, {new.origins['max_steps']}), whatever epochs says: "
        "give --max-steps to go on longer",
    )


def _same(field: Declared, before: Any, after: Any) -> bool:
    if before == after:
        return True
    if field.kind == "paths":
        return len(before) == len(after) and all(os.path.abspath(a) == os.path.abspath(b) for a, b in zip(before, after))
    if field.kind == "text" and before is not None and after is not None:
        return os.path.abspath(before) == os.path.abspath(after)
    return False


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "not given"
    return "not given" if value is None or value == {} else str(value)
