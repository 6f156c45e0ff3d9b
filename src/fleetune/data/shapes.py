"""What a row looks like: found by looking at the first rows of a file, or told by the person."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetune.data.rows import listed
from fleetune.spec.errors import UserError

#: Roles that a column can be given by --columns.
ROLES = ("prompt", "input", "response", "system", "text", "messages", "tools")
#: Rows that are looked at to find the shape.
ROWS_LOOKED_AT = 100

_TURNS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "turns")
_PROMPTS = ("prompt", "question", "query", "instruction", "problem", "user", "input")
_RESPONSES = ("completion", "response", "answer", "output", "solution", "assistant", "reply", "target")
_TEXTS = ("text", "content", "document", "body")
_SYSTEMS = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
_EXPECTED = {
    "alpaca": "instruction and output (input, system, history if there)",
    "sharegpt": "conversations, a list of {from, value} (system, tools if there)",
    "messages": "messages, a list of {role, content} (tools if there)",
    "prompt": "prompt and completion (or response), or question and answer (system if there)",
    "text": "text",
}
_FLAGS = {
    "alpaca": "--columns prompt=COLUMN,response=COLUMN",
    "sharegpt": "--columns messages=COLUMN",
    "messages": "--columns messages=COLUMN",
    "prompt": "--columns prompt=COLUMN,response=COLUMN",
    "text": "--columns text=COLUMN",
}


@dataclass(frozen=True)
class Shape:
    """name: alpaca, sharegpt, messages, prompt or text. columns: role -> column (also `history` of alpaca)."""

    name: str
    columns: Mapping[str, str]

    def spoken(self) -> str:
        return f"{self.name} ({', '.join(f'{role}={column}' for role, column in self.columns.items())})"


def check_columns(columns: Mapping[str, str]) -> list[str]:
    """Problems of a column mapping that can be told without any data."""
    unknown = sorted(set(columns) - set(ROLES))
    if unknown:
        return [f"columns names the role {unknown[0]!r}, which is none: the roles are {', '.join(ROLES)}"]
    return []


def find_shape(rows: Sequence[Mapping[str, Any]], *, forced: str, mapped: Mapping[str, str], where: str) -> Shape:
    """The shape of the rows of one file. forced: a shape's name or `auto`. mapped: role -> column, as the person gave it.

    Raises UserError that names the columns seen, those expected, and the flag that maps them.
    """
    seen = list(dict.fromkeys(name for row in rows for name in row))
    missing = {role: column for role, column in mapped.items() if column not in seen}
    if missing:
        role, column = next(iter(missing.items()))
        raise UserError(
            f"{where}: no row has the column {column!r} that --columns gives to {role}: the columns are {listed(seen)}"
        )
    if not mapped and {"chosen", "rejected"} <= set(seen):
        raise UserError(
            f"{where} holds preferences (chosen, rejected), which cannot be trained on yet: give rows with one answer each. To "
            "train on the better answers alone, write them as prompt and response columns"
        )
    look = _Look(rows, {name.lower(): name for name in reversed(seen)}, mapped)
    names = [forced] if forced != "auto" else _names_for(mapped)
    for name in names:
        if columns := look.columns_of(name):
            return Shape(name, columns)
    expected = "; ".join(f"{_EXPECTED[name]} [{name}]" for name in names)
    flags = " or ".join(dict.fromkeys(_FLAGS[name] for name in names))
    raise UserError(f"{where}: the columns {listed(seen) or '(none)'} fit no shape. Expected: {expected}. Map yours: {flags}")


def _names_for(mapped: Mapping[str, str]) -> list[str]:
    """Shapes that a mapping leaves possible, in the order in which they are tried."""
    if "text" in mapped:
        return ["text"]
    if "messages" in mapped:
        return ["sharegpt", "messages"]
    if "prompt" in mapped or "response" in mapped:
        return ["prompt"]
    return ["sharegpt", "messages", "alpaca", "prompt", "text"]


class _Look:
    """Which columns play which role, by their names and by what they hold."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], by_name: Mapping[str, str], mapped: Mapping[str, str]) -> None:
        self.rows = rows
        self.by_name = by_name
        self.mapped = mapped

    def columns_of(self, shape: str) -> dict[str, str]:
        """role -> column; empty where the rows do not have this shape."""
        if shape in ("sharegpt", "messages"):
            return self._turns("from" if shape == "sharegpt" else "role")
        if shape == "text":
            column = self._named("text", _TEXTS)
            return {"text": column} if column else {}
        is_alpaca = shape == "alpaca"
        prompt = self._named("prompt", ("instruction",) if is_alpaca else _PROMPTS)
        response = self._named("response", ("output", "response") if is_alpaca else _RESPONSES, but=prompt)
        if not prompt or not response:
            return {}
        found = {"prompt": prompt, "response": response}
        context = self._named("input", ("input",) if is_alpaca else ())
        history = self.by_name.get("history") if is_alpaca else None
        system = self._named("system", _SYSTEMS)
        optional = {"input": context, "history": history, "system": system, "tools": self.mapped.get("tools")}
        return {**found, **{role: column for role, column in optional.items() if column and column not in found.values()}}

    def _turns(self, key: str) -> dict[str, str]:
        names = [self.mapped["messages"]] if "messages" in self.mapped else [self.by_name.get(name) for name in _TURNS]
        for column in names:
            if column and self._holds_turns(column, key):
                system, tools = self._named("system", _SYSTEMS), self._named("tools", _TOOLS)
                optional = {"system": system, "tools": tools}
                return {"messages": column, **{role: name for role, name in optional.items() if name}}
        return {}

    def _holds_turns(self, column: str, key: str) -> bool:
        for row in self.rows:
            value = row.get(column)
            if isinstance(value, str) and value.lstrip().startswith("["):
                try:
                    value = json.loads(value)
                except (ValueError, RecursionError):
                    continue
            if isinstance(value, list) and any(isinstance(turn, dict) and key in turn for turn in value):
                return True
        return False

    def _named(self, role: str, names: Sequence[str], but: str | None = None) -> str | None:
        if role in self.mapped:
            return self.mapped[role]
        return next((self.by_name[name] for name in names if name in self.by_name and self.by_name[name] != but), None)
