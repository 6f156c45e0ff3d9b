"""A row and where it stood: what every reader yields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: One row may not be larger than this; a larger one is a bad row, never a full memory.
MAX_ROW_BYTES = 64 << 20


@dataclass(frozen=True)
class DataFile:
    """One table of rows. A folder of Arrow files is one.

    id: its name in sample ids, unique in a run. path: what is named to a person. format: json, csv, parquet, text or arrow.
    parts: the files that hold its rows, in order. source: number of the --data that it belongs to.
    """

    id: str
    path: Path
    format: str
    parts: tuple[Path, ...]
    source: int


@dataclass(frozen=True)
class Row:
    """number: the row as in the original file, from 1 (a line of a line-based file). line: where it begins, if known."""

    number: int
    fields: dict[str, Any]
    line: int | None = None


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    number: int
    cause: str
    line: int | None = None


def spoken_type(value: Any) -> str:
    """The type of a JSON value in a person's words."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    words = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}
    return words.get(type(value), f"a {type(value).__name__}")


def checked_text(text: str, where: str) -> str:
    """`text` itself, or ValueError where it holds what is no character."""
    if "\0" in text:
        raise ValueError(f"{where} holds a NUL character")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} holds half a character (a lone surrogate) at position {error.start}") from None
    return text


def decoded(data: bytes, *, what: str = "the row") -> str:
    """UTF-8 text of `data`; ValueError names the byte that is none."""
    if b"\0" in data:
        raise ValueError(f"{what} holds a NUL byte")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}") from None


def listed(names: Iterable[str], limit: int = 20) -> str:
    """Names for a message, with how many were left out."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
