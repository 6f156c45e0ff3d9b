"""Tables of single turns that name their parents, as conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleetune.spec.errors import UserError


@dataclass(frozen=True)
class Columns:
    """Names of a table's columns; None where it has none of the kind. prompt: one or several, joined by a blank line."""

    prompt: tuple[str, ...] = ("instruction",)
    answer: str = "output"
    system: str | None = None
    parent: str | None = None
    id: str = "id"


def conversations(rows: Iterable[Mapping[str, Any]], columns: Columns, *, only_whole: bool) -> Iterator[dict[str, Any]]:
    """`{"messages": [...]}` of each row with all turns before it. only_whole: only of rows that nobody names as a parent.

    Raises UserError for a parent that is not there, and for a circle.
    """
    table = list(rows)
    missing = [name for name in _needed(columns) if table and name not in table[0]]
    if missing:
        raise UserError(f"the table has the columns {', '.join(table[0])} and lacks {', '.join(missing)}: name yours")
    if columns.parent is None:
        yield from ({"messages": _messages([row], columns)} for row in table)
        return
    by_id = {_key(row[columns.id]): row for row in table}
    if len(by_id) < len(table):
        raise UserError(f"the column {columns.id!r} names a row twice: give each row an id of its own")
    parents = {_key(row[columns.parent]) for row in table}
    for row in table:
        if not only_whole or _key(row[columns.id]) not in parents:
            yield {"messages": _messages(_chain(row, by_id, columns), columns)}


def _needed(columns: Columns) -> list[str]:
    optional = [name for name in (columns.system, columns.parent) if name is not None]
    return [*columns.prompt, columns.answer, *optional, *([columns.id] if columns.parent else [])]


def _chain(row: Mapping[str, Any], by_id: Mapping[str, Mapping[str, Any]], columns: Columns) -> list[Mapping[str, Any]]:
    """The row and all before it, the first one first."""
    found = [row]
    assert columns.parent is not None
    while parent := _key(found[0][columns.parent]):
        if parent not in by_id:
            raise UserError(
                f"row {_key(found[0][columns.id])!r} names the parent {parent!r}, which is not there: add it, or empty it"
            )
        if len(found) > len(by_id):
            raise UserError(f"row {_key(row[columns.id])!r} is its own ancestor: mend the column {columns.parent!r}")
        found.insert(0, by_id[parent])
    return found


def _messages(chain: list[Mapping[str, Any]], columns: Columns) -> list[dict[str, str]]:
    said: list[dict[str, str]] = []
    system = str(chain[0].get(columns.system) or "") if columns.system else ""
    if system.strip():
        said.append({"role": "system", "content": system})
    for row in chain:
        asked = "\n\n".join(str(row[name]) for name in columns.prompt if row[name] not in (None, ""))
        said += [{"role": "user", "content": asked}, {"role": "assistant", "content": str(row[columns.answer] or "")}]
    return said


def _key(value: Any) -> str:
    """An id as text; empty for none. A table of numbers gives 3.0 where a parent may be missing."""
    if value is None or str(value).strip().lower() in ("", "none", "nan"):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    return text.removesuffix(".0") if text.removesuffix(".0").isdigit() else text
