"""What a chat template can say, found by rendering small conversations with it and looking whether a mark comes out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from fleetune.data.sandbox import Refused

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

#: Names under which templates look for an answer's reasoning.
REASONING = ("reasoning_content", "reasoning", "thinking")
_MARK = "fleetuneprobe"
_USER: dict[str, Any] = {"role": "user", "content": "a"}
_DESCRIBED = {"name": "d", "description": "e", "parameters": {"type": "object", "properties": {}}}
_CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": f"{_MARK}name", "arguments": {"at": f"{_MARK}value"}}}],
}


class Render(Protocol):
    """The template's text of `messages`; with `ask`, up to where an answer begins. Raises Refused."""

    def __call__(self, messages: Messages, tools: Tools = None, *, ask: bool = False) -> str: ...


@dataclass(frozen=True)
class CallStyle:
    """How a template wants a turn that only calls tools. no_content: its content is none, not an empty text. as_text: the
    arguments are JSON text, not an object. with_ids: calls and results need ids."""

    no_content: bool
    as_text: bool
    with_ids: bool


@dataclass(frozen=True)
class Abilities:
    """What a template can say. tool_calls: how, None for not at all. generation_prompt: it takes notice of being asked.
    asks_as_it_writes: what it asks with is what it writes before an answer. inline_reasoning: reasoning between <think> and
    </think> in an answer's text comes out. closing: the end-of-text token, where it follows the last turn and no other."""

    system: bool
    tools: bool
    tool_calls: CallStyle | None
    tool_results: bool
    reasoning: bool
    inline_reasoning: bool
    generation_prompt: bool
    asks_as_it_writes: bool
    closing: str


def find_abilities(render: Render, *, with_tools: bool, end_of_text: str) -> Abilities:
    """Try the template out, in conversations without or with tools (a template may differ in them, or be another one)."""
    tools: Tools = [{"type": "function", "function": _DESCRIBED}] if with_tools else None
    marked: Tools = [{"type": "function", "function": {**_DESCRIBED, "name": _MARK}}]
    style = _call_style(render, tools)
    said = in_style([_CALLING], style)[0] if style else {"role": "assistant", "content": "a"}
    result = {"role": "tool", "name": "b", "tool_call_id": "call00001", "content": f"{_MARK}result"}
    answer: dict[str, Any] = {"role": "assistant", "content": "a"}
    asked, asked_not = _text(render, [_USER], tools, ask=True), _text(render, [_USER], tools)
    return Abilities(
        system=_MARK in _text(render, [{"role": "system", "content": _MARK}, _USER], tools),
        tools=_MARK in _text(render, [_USER], marked),
        tool_calls=style,
        tool_results=f"{_MARK}result" in _text(render, [_USER, said, result], tools),
        reasoning=_MARK in _text(render, [_USER, {**answer, **dict.fromkeys(REASONING, _MARK)}], tools),
        inline_reasoning=_MARK in _text(render, [_USER, {**answer, "content": f"<think>\n{_MARK}\n</think>\n\na"}], tools),
        generation_prompt=asked != asked_not,
        asks_as_it_writes=_text(render, [_USER, answer], tools).startswith(asked),
        closing=_closing(render, tools, end_of_text),
    )


def _text(render: Render, messages: Messages, tools: Tools, *, ask: bool = False) -> str:
    """The rendered text; empty where the template refuses."""
    try:
        return render(messages, tools, ask=ask)
    except Refused:
        return ""


def _call_style(render: Render, tools: Tools) -> CallStyle | None:
    """The first style in which a call comes out whole; None where a template has no words for calls."""
    for choices in itertools.product((True, False), (False, True), (False, True)):
        style = CallStyle(*choices)
        text = _text(render, in_style([_USER, _CALLING], style), tools)
        if f"{_MARK}name" in text and f"{_MARK}value" in text and "None" not in text:
            return style
    return None


def _closing(render: Render, tools: Tools, end_of_text: str) -> str:
    """The end-of-text token, where a template writes it after the last turn only; nothing else counts."""
    answered = [_USER, {"role": "assistant", "content": "a"}]
    last, earlier = _text(render, answered, tools), _text(render, [*answered, _USER], tools)
    if not end_of_text or not last.endswith(end_of_text) or earlier.startswith(last):
        return ""
    return end_of_text if earlier.startswith(last.removesuffix(end_of_text)) else ""


def common_length(one: str, other: str) -> int:
    """Characters that two texts have in common at their beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def in_style(messages: Messages, style: CallStyle) -> Messages:
    """Messages with their calls as a template wants them."""
    numbers = itertools.count(1)
    open_calls: list[str] = []
    styled = [_with_ids(message, numbers, open_calls) for message in messages] if style.with_ids else messages
    return [_with_calls(message, style) if message.get("tool_calls") else message for message in styled]


def _with_calls(message: dict[str, Any], style: CallStyle) -> dict[str, Any]:
    calls = message["tool_calls"]
    if style.as_text:
        calls = [{**call, "function": {**call["function"], "arguments": _as_text(call)}} for call in calls]
    content = None if style.no_content and not message["content"] else message["content"]
    return {**message, "content": content, "tool_calls": calls}


def _as_text(call: dict[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_ids(message: dict[str, Any], numbers: Iterator[int], open_calls: list[str]) -> dict[str, Any]:
    """The message with ids of its calls (nine letters and digits, as some templates ask), or with the id of its call."""
    if message.get("tool_calls"):
        calls = [call if "id" in call else {**call, "id": f"call{next(numbers):05d}"} for call in message["tool_calls"]]
        open_calls[:] = [call["id"] for call in calls]
        return {**message, "tool_calls": calls}
    if message["role"] == "tool" and "tool_call_id" not in message and open_calls:
        return {**message, "tool_call_id": open_calls.pop(0)}
    return message
