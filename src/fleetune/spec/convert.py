"""From what was given (text of a flag, a YAML value, a Python object) to the type of a field. Raises ValueError."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from fleetune.spec.declared import Declared

_SWITCH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def convert(field: Declared, value: Any) -> Any:
    """`value` as the type of `field`; bounds are checked by the spec. ValueError says what it is not, as `is not a number`."""
    if value is None:
        if field.optional:
            return None
        if field.kind in ("words", "numbers", "paths", "columns"):
            return field.default
        raise ValueError("is empty")
    if field.kind in ("text", "choice"):
        return _text(value, field)
    if field.kind == "whole":
        return _whole(value)
    if field.kind == "number":
        return _number(value)
    if field.kind == "switch":
        return _switch(value)
    if field.kind == "columns":
        return _columns(value)
    return _list(field, value)


def _text(value: Any, field: Declared) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ValueError("is not text")
    if "\0" in value or "\n" in value:
        raise ValueError("holds a line break or a NUL")
    if field.kind == "choice" and value not in field.choices:
        whys = [why for part, why in field.refused if part in value.lower()]
        raise ValueError(whys[0] if whys else "is not known")
    return value


def _whole(value: Any) -> int:
    number = _number(value, "is not a whole number")
    if isinstance(number, float):
        if not number.is_integer():
            raise ValueError("is not a whole number")
        return int(number)
    return number


def _number(value: Any, complaint: str = "is not a number") -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(complaint)
    if isinstance(value, str):
        try:
            value = int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
        except ValueError:
            raise ValueError(complaint) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is not finite")
    return value


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    try:
        return _SWITCH[str(value).strip().lower()]
    except KeyError:
        raise ValueError("is neither on nor off") from None


def _columns(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        value = {role.strip(): column.strip() for role, _, column in pairs}
    if not isinstance(value, Mapping) or not all(isinstance(part, str) and part for item in value.items() for part in item):
        raise ValueError("does not give each role a column")
    return dict(value)


def _list(field: Declared, value: Any) -> tuple[Any, ...]:
    if field.kind == "paths":
        return _paths(value)
    entries: list[Any] = []
    for entry in value if isinstance(value, (list, tuple)) else [value]:
        entries += [part.strip() for part in entry.split(",") if part.strip()] if isinstance(entry, str) else [entry]
    if field.kind == "numbers":
        return tuple(float(_number(entry, "has an entry that is not a number")) for entry in entries)
    if not all(isinstance(entry, str) for entry in entries):
        raise ValueError("has an entry that is not text")
    return tuple(entries)


def _paths(value: Any) -> tuple[str, ...]:
    """One path, never split (a comma may be part of its name), or several."""
    entries = [value] if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, (str, os.PathLike)) for entry in entries):
        raise ValueError("is not a path, nor a list of paths")
    paths = tuple(str(os.fspath(entry)) for entry in entries)
    if any(not path or "\0" in path for path in paths):
        raise ValueError("has an empty path in it, or a NUL")
    return paths
