"""One row as a conversation or a text, in one form whatever its shape. Raises ValueError with the cause where it is neither."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetune.data.json_rows import parse_json
from fleetune.data.rows import checked_text, spoken_type
from fleetune.data.shapes import Shape

#: Names that data sets give to the four roles of a conversation.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them: role (system, user, assistant, tool), content (text), and where there are any
    tool_calls (arguments as objects), reasoning_content, name, tool_call_id. tools: function descriptions, or None."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None

    @property
    def system(self) -> str:
        """The system text it begins with, or ""."""
        first = self.messages[0] if self.messages else {"role": ""}
        return str(first["content"]) if first["role"] == "system" else ""


@dataclass(frozen=True)
class Text:
    """Plain text, trained from its first to its last token."""

    text: str


def read_row(fields: Mapping[str, Any], shape: Shape) -> Conversation | Text:
    """The row's conversation or text."""
    columns = shape.columns
    if shape.name == "text":
        return Text(_text(fields, columns["text"], "text"))
    tools = _tools(fields.get(columns["tools"])) if "tools" in columns else None
    messages = [] if "system" not in columns else _system(fields.get(columns["system"]))
    if shape.name in ("sharegpt", "messages"):
        turns = _list(fields, columns["messages"])
        messages += [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    else:
        messages += _pair(fields, columns)
    _check_answers(messages, columns.get("response") or columns["messages"])
    return Conversation(tuple(messages), tools)


def _text(fields: Mapping[str, Any], column: str, what: str) -> str:
    value = fields.get(column)
    if value is None:
        raise ValueError(f"has no {what}: the column {column!r} is missing or null")
    if not isinstance(value, str):
        raise ValueError(f"the column {column!r} holds {spoken_type(value)} where text was expected")
    if not value.strip():
        raise ValueError(f"has no {what}: the column {column!r} is empty")
    return checked_text(value, f"the column {column!r}")


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None or value == "":
        return []
    if not isinstance(value, str):
        raise ValueError(f"the system column holds {spoken_type(value)} where text was expected")
    return [{"role": "system", "content": checked_text(value, "the system column")}]


def _pair(fields: Mapping[str, Any], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """A prompt and its response: texts, or (as some data sets have them) lists of messages."""
    messages: list[dict[str, Any]] = []
    for old in _list(fields, columns["history"]) if fields.get(columns.get("history", "")) else []:
        if not (isinstance(old, list) and len(old) == 2 and all(isinstance(text, str) for text in old)):
            raise ValueError(f"the column {columns['history']!r} is not a list of pairs of texts")
        messages += _turns(checked_text(old[0], "the history"), checked_text(old[1], "the history"))
    prompt, response = columns["prompt"], columns["response"]
    if isinstance(fields.get(prompt), list):
        messages += [_message(turn, number) for number, turn in enumerate(fields[prompt], start=1)]
    else:
        asked = _text(fields, prompt, "prompt")
        context = fields.get(columns["input"]) if "input" in columns else None
        if context is not None and not isinstance(context, str):
            raise ValueError(f"the column {columns['input']!r} holds {spoken_type(context)} where text was expected")
        if context and context.strip():
            asked = f"{asked}\n\n{checked_text(context, 'the input column')}"
        messages.append({"role": "user", "content": asked})
    if isinstance(fields.get(response), list):
        return messages + [_message(turn, number) for number, turn in enumerate(fields[response], start=1)]
    return [*messages, {"role": "assistant", "content": _text(fields, response, "answer")}]


def _turns(user: str, assistant: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _list(fields: Mapping[str, Any], column: str) -> list[Any]:
    value = fields.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value)
    if not isinstance(value, list):
        raise ValueError(f"the column {column!r} holds {spoken_type(value)} where a list of turns was expected")
    if not value:
        raise ValueError(f"has no turns: the column {column!r} is an empty list")
    return value


def _message(turn: Any, number: int) -> dict[str, Any]:
    """One turn of either form ({from, value} or {role, content}) as a message."""
    where = f"turn {number}"
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is {spoken_type(turn)}, not an object")
    said = turn.get("role", turn.get("from"))
    role = _ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise ValueError(f"{where} has the role {said!r}, which is none of {', '.join(sorted(_ROLES))}")
    content = _content(turn.get("content", turn.get("value")), where)
    if role == "function_call":
        calls = _calls_of_text(content)
        return {"role": "assistant", "content": "", "tool_calls": calls} if calls else {"role": "assistant", "content": content}
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if turn.get("tool_calls"):
            message["tool_calls"] = _calls(turn["tool_calls"], where)
        reasoning = next((turn[name] for name in _REASONING if isinstance(turn.get(name), str) and turn[name]), None)
        if reasoning:
            message["reasoning_content"] = checked_text(reasoning, where)
    for name in ("name", "tool_call_id") if role == "tool" else ():
        if isinstance(turn.get(name), str):
            message[name] = checked_text(turn[name], where)
    return message


def _content(value: Any, where: str) -> str:
    """Text, or a list of text parts as text; nothing is an empty text (a turn that only calls a tool)."""
    if value is None:
        return ""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else spoken_type(part)
                raise ValueError(f"{where} holds a part that is not text ({kind}); only text can be trained on")
        value = "".join(part["text"] for part in value)
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise ValueError(f"{where} holds {spoken_type(value)} where text was expected")
    return checked_text(value, where)


def _calls_of_text(text: str) -> list[dict[str, Any]]:
    """Tool calls of a function_call turn, `{"name": ..., "arguments": ...}` or a list of them; empty where it is neither."""
    try:
        return _calls(parse_json(text), "")
    except ValueError:
        return []


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as templates expect them."""
    if isinstance(value, str):
        value = parse_json(value)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where} has a tool call without a name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # arguments that are no JSON are kept as the text they are
                arguments = parse_json(arguments)
        _check_deep(arguments, where)
        kept = {"type": "function", "function": {"name": checked_text(function["name"], where), "arguments": arguments}}
        calls.append({**kept, "id": call["id"]} if isinstance(call.get("id"), str) else kept)
    return calls


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """Function descriptions, each as {"type": "function", "function": {...}}."""
    if isinstance(value, str):
        value = parse_json(value) if value.strip() else None
    if not value:
        return None
    described = []
    for tool in value if isinstance(value, list) else [value]:
        if isinstance(tool, str):
            tool = parse_json(tool)
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("the tools column describes a tool without a name")
        _check_deep(tool, "the tools column")
        described.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(described)


def _check_deep(value: Any, where: str) -> None:
    """Every text inside of `value` holds only characters."""
    if isinstance(value, str):
        checked_text(value, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            checked_text(key, where)
            _check_deep(item, where)
    elif isinstance(value, list):
        for item in value:
            _check_deep(item, where)


def _check_answers(messages: list[dict[str, Any]], column: str) -> None:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise ValueError(f"has no answer: the column {column!r} has no turn of the assistant")
    if not any(message["content"].strip() or message.get("tool_calls") for message in answers):
        raise ValueError(f"has no answer: every turn of the assistant in {column!r} is empty")
