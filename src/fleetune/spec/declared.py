"""The spec's fields as others need them: flags, help, error texts and the reference are made from these."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from fleetune.spec import run_spec, section

#: text, one word of a list, a whole number, a number, on or off; lists of words, numbers or paths; role=column pairs.
Kind = Literal["text", "choice", "whole", "number", "switch", "words", "numbers", "paths", "columns"]

_PLAIN: dict[Any, Kind] = {str: "text", int: "whole", float: "number", bool: "switch"}
_LISTS: dict[Any, Kind] = {
    section.Words: "words",
    section.Numbers: "numbers",
    section.Paths: "paths",
    section.Columns: "columns",
}


@dataclass(frozen=True)
class Declared:
    """One field as it is declared. limits: bounds in words, as `at least 1`. optional: whether it may be left open.

    refused: (part of a word, why it is not among the choices)."""

    name: str
    section: str
    kind: Kind
    default: Any
    optional: bool
    choices: tuple[str, ...]
    limits: str
    description: str
    aliases: tuple[str, ...]
    resume: bool
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def flag(self) -> str:
        """As it is shown: `--learning-rate`; a field named `x_output` beside an alias `x` is shown as its alias."""
        return "--" + self.shown.replace("_", "-")

    @property
    def shown(self) -> str:
        short = self.name.removesuffix("_output")
        return short if short != self.name and short in self.aliases else self.name

    def allowed(self) -> str:
        """What may be given, as the object of `give`: `a whole number, at least 1`."""
        words = {
            "text": "a text",
            "choice": f"one of {', '.join(self.choices)}",
            "whole": "a whole number",
            "number": "a number",
            "switch": "on or off",
            "words": "names, as a,b",
            "numbers": "numbers, as 1,0.5",
            "paths": "a file, a folder or a hub id",
            "columns": "ROLE=COLUMN pairs, as prompt=question,response=answer",
        }[self.kind]
        return f"{words}, {self.limits}" if self.limits else words


@cache
def declared() -> dict[str, Declared]:
    """Every field of the spec by name, in order."""
    return {name: _declared(name, section, info) for name, (section, info) in run_spec.fields().items()}


@cache
def section_titles() -> dict[str, str]:
    """Section -> what it is about, from its docstring's first line."""
    return {name: (cls.__doc__ or "").strip().splitlines()[0].rstrip(".") for name, cls in run_spec.sections().items()}


def _declared(name: str, section: str, info: Any) -> Declared:
    kind, choices, optional = _kind(_annotation(info))
    extra = info.json_schema_extra
    return Declared(
        name=name,
        section=section,
        kind=kind,
        default=info.default,
        optional=optional,
        choices=choices,
        limits=_limits(info, kind),
        description=info.description,
        aliases=tuple(extra["aliases"]),
        resume=bool(extra["resume"]),
        refused=extra["refused"],
    )


def _annotation(info: Any) -> Any:
    """The field's own annotation: pydantic keeps the bare type, and its validator beside it."""
    for annotated in _LISTS:
        if info.annotation == get_args(annotated)[0] and annotated.__metadata__[0] in info.metadata:
            return annotated
    return info.annotation


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...], bool]:
    if annotation in _LISTS:
        return _LISTS[annotation], (), False
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    optional = type(None) in parts
    (inner,) = [part for part in parts if part is not type(None)]
    if get_origin(inner) is Literal:
        return "choice", tuple(get_args(inner)), optional
    return _PLAIN[inner], (), optional


def _limits(info: Any, kind: Kind) -> str:
    said = []
    for bound, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        for entry in info.metadata:
            value = getattr(entry, bound, None)
            if value is not None:
                said.append(f"{words} {value:g}" if kind == "number" else f"{words} {value}")
    return " and ".join(said)
