"""h2oGPT's prompt types: each a chat template of our own wording, or the model's own."""

from __future__ import annotations

import difflib
from importlib import resources

from fleetune.spec.errors import UserError

#: Name -> number, of those that can be trained with. The last ones are a model's own chat template.
WRITTEN = {"plain": 0, "instruct": 1, "human_bot": 3, "simple_instruct": 6}
OWN = {
    "template": -3,
    "llama2": 29,
    "mistral": 34,
    "zephyr": 35,
    "llama3": None,
    "mixtral": None,
    "gemma": 67,
    "qwen": 68,
}
_REASONS = {
    "custom": "it is given in code, and a run must say by itself what it was trained with",
    "unknown": "it says nothing of the rows",
}
_NUMBERS = {-1: "custom", -2: "unknown"}


def find_prompt_type(given: str | int) -> str:
    """The name of a prompt type that was given by name or number. Raises UserError for one that cannot be trained with."""
    numbers = {number: name for name, number in {**WRITTEN, **OWN}.items() if number is not None}
    name = str({**numbers, **_NUMBERS}.get(given, given) if isinstance(given, int) else given)
    if name in WRITTEN or name in OWN:
        return name
    known = [*WRITTEN, *OWN]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}, or your own Jinja file as --chat-template"
    reason = f" ({_REASONS[name]})" if name in _REASONS else ""
    raise UserError(f"prompt_type {given!r} cannot be trained with{reason}: {hint}")


def template_of(name: str) -> str | None:
    """The Jinja file of a prompt type; None: the model's own chat template."""
    if name not in WRITTEN:
        return None
    return str(resources.files("fleetune.bridges.h2ogpt").joinpath("templates").joinpath(f"{name}.jinja"))
