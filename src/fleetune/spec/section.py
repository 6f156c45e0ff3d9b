"""What the sections of the spec are made of: how a field is declared, and what a person may write for a list or a table."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A part of the spec. Frozen; what it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def declare(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    resume: bool = False,
    refused: tuple[tuple[str, str], ...] = (),
    **limits: Any,
) -> Any:
    """One field of the spec. `aliases`: other tools' names for it. `resume`: whether it may change on `--resume`.

    refused: (part of a word, why it is none of the words that may be given), for words that a person may well know.
    """
    extra: Any = {"aliases": list(aliases), "resume": resume, "refused": refused}
    return Field(default, description=help, json_schema_extra=extra, **limits)


def _words(value: Any) -> Any:
    """A list field takes `a,b` as well as `[a, b]`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


def _paths(value: Any) -> Any:
    """One path (never split: a comma may be part of its name) or several, as a repeated flag or a list gives them."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _columns(value: Any) -> Any:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if any(not middle for _, middle, _ in pairs):
            raise ValueError("write it as ROLE=COLUMN,ROLE=COLUMN, for instance prompt=question,response=answer")
        return {role.strip(): column.strip() for role, _, column in pairs}
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Paths = Annotated[tuple[str, ...], BeforeValidator(_paths)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_words)]
Columns = Annotated[dict[str, str], BeforeValidator(_columns)]
