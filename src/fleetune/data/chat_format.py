"""Conversations as one model's chat template writes them, and which characters are the assistant's.

What is trained comes from the template's own renderings: from its `{% generation %}` marks, or else from the difference
between the text that asks for an answer (the turns before it, with the generation prompt) and the text with the answer.
What a template cannot say (tools, system text, ...) is found by trying it, and said in one stated way instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fleetune.data.conversations import Conversation
from fleetune.data.literals import Rendered
from fleetune.data.sandbox import FIXED_DATE, Refused, Template

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

_MARK = "fleetuneprobe"
_REASONING = ("reasoning_content", "reasoning", "thinking")


def plain_template(*, starts_with_bos: bool) -> str:
    """The format of a model without a chat template: prompt, a line end, the response, the end-of-text token.

    Whoever lets such a model answer must use it too (as the tokenizer's chat_template): one template for both.
    """
    start = "{{ bos_token }}" if starts_with_bos else ""
    return (
        start + "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    )


@dataclass(frozen=True)
class Abilities:
    """What a template can say, found by rendering small conversations."""

    system: bool
    tools: bool
    tool_calls: bool
    needs_call_ids: bool
    tool_results: bool
    reasoning: bool
    generation_prompt: bool


class ChatFormat:
    """The chat template of one tokenizer.

    template, tool_template: Jinja sources (the second for conversations with tools; None: the same). constants: the special
    tokens by name. is_plain: the tokenizer has no template, and `plain_template` is used. Raises Refused for no valid Jinja.
    """

    def __init__(
        self, template: str, constants: dict[str, Any], *, tool_template: str | None = None, is_plain: bool = False
    ) -> None:
        self._template = Template(template, constants)
        self._tool_template = Template(tool_template, constants) if tool_template else self._template
        self.is_plain = is_plain
        self.abilities = self._try()

    def render(self, messages: Messages, tools: Tools = None, *, ask: bool = False) -> str:
        """The text of `messages`; with `ask`, up to where the assistant's answer begins. Raises Refused."""
        return (self._tool_template if tools else self._template).render(messages, tools, add_generation_prompt=ask)[0]

    def parts(self, conversation: Conversation, *, train_all: bool = False) -> list[Rendered]:
        """The conversation as one text, or as one for each turn where the template writes earlier turns differently.

        A template that rewrites history (one that drops the reasoning of earlier turns, say) would never show the model an
        earlier answer as it has to be given; so each answer is trained in the text that ends with it. Raises Refused.
        """
        messages, tools = self.adapt(conversation)
        template = self._tool_template if tools else self._template
        if train_all:
            text, _ = template.render(messages, tools)
            return [Rendered(text, ((0, len(text)),))]
        if template.marks_generation:
            text, bounds = template.render(messages, tools)
            return [Rendered(text, tuple(bounds), is_marked=True)]
        parts: list[Rendered] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not (message["content"].strip() or message.get("tool_calls")):
                continue
            text = self.render(messages[: index + 1], tools)
            answer = (self._answer_start(messages[:index], message, tools, text), len(text))
            if parts and text.startswith(parts[-1].text):
                parts[-1] = Rendered(text, (*parts[-1].answers, answer))
            else:
                parts.append(Rendered(text, (answer,)))
        return parts

    def _answer_start(self, before: Messages, answer: dict[str, Any], tools: Tools, text: str) -> int:
        """Where the answer begins in `text`: after the generation prompt, or, where a template has none or writes another
        one than before an answer, where the text begins to depend on what is answered."""
        if self.abilities.generation_prompt:
            asked = self.render(before, tools, ask=True)
            if text.startswith(asked):
                return len(asked)
        other = "¶" if answer["content"].lstrip().startswith("§") else "§"
        kept = {name: value for name, value in answer.items() if name != "tool_calls"}
        return _common_length(text, self.render([*before, {**kept, "content": other}], tools))

    def adapt(self, conversation: Conversation) -> tuple[Messages, Tools]:
        """Messages and tools as this template can say them."""
        abilities = self.abilities
        messages: Messages = []
        for message in conversation.messages:
            message = self._spoken(message)
            if message["role"] == "tool" and not abilities.tool_results:
                message = {"role": "user", "content": f"Tool result:\n{message['content']}"}
                if messages and messages[-1].get("content", "").startswith("Tool result:\n") and messages[-1]["role"] == "user":
                    messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{message['content']}"}
                    continue
            messages.append(message)
        tools = list(conversation.tools) if conversation.tools else None
        if tools and not abilities.tools:
            messages, tools = _with_system(messages, _described(tools)), None
        if not abilities.system:
            messages = _without_system(messages)
        if abilities.needs_call_ids:
            messages = _with_call_ids(messages)
        return messages, tools

    def _spoken(self, message: dict[str, Any]) -> dict[str, Any]:
        """One message, its reasoning and its tool calls in words where the template has no place for them."""
        message = dict(message)
        reasoning = message.pop("reasoning_content", None)
        if reasoning and self.abilities.reasoning:
            message.update({name: reasoning for name in _REASONING})
        elif reasoning:
            message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
        if message.get("tool_calls") and not self.abilities.tool_calls:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.pop("tool_calls")]
            message["content"] = "\n".join([message["content"], *calls] if message["content"] else calls)
        return message

    def notes(self) -> dict[str, str]:
        """What is said otherwise than the template would, in a person's words; empty where it can say everything."""
        abilities = self.abilities
        notes = {
            "template": "" if not self.is_plain else "none: prompt, a line end, the response, the end-of-text token",
            "system": "" if abilities.system else "put in front of the first user turn",
            "tools": "" if abilities.tools else "described in the system text, one JSON object a line",
            "tool_calls": "" if abilities.tool_calls else "written as JSON in the assistant's text, one call a line",
            "tool_results": "" if abilities.tool_results else "written as a user turn that begins with 'Tool result:'",
            "reasoning": "" if abilities.reasoning else "written in front of the answer, between <think> and </think>",
            "date": "" if "strftime_now" not in self._template.source else f"rendered as {FIXED_DATE:%d %b %Y}, always",
        }
        return {name: note for name, note in notes.items() if note}

    def _try(self) -> Abilities:
        user = {"role": "user", "content": "a"}
        call = {"type": "function", "function": {"name": _MARK, "arguments": {"b": "c"}}}
        described = {"name": _MARK, "description": "d", "parameters": {"type": "object", "properties": {}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        calling_by_id = {**calling, "tool_calls": [{**call, "id": "call00001"}]}
        tools = [{"type": "function", "function": described}]
        by_id = self._says([user, calling_by_id])
        without_id = self._says([user, calling])
        said = calling_by_id if by_id else {"role": "assistant", "content": "a"}
        result = {"role": "tool", "name": "b", "tool_call_id": "call00001", "content": _MARK + "result"}
        reasoned = {"role": "assistant", "content": "a", **dict.fromkeys(_REASONING, _MARK)}
        return Abilities(
            system=self._says([{"role": "system", "content": _MARK}, user]),
            tools=self._says([user], tools),
            tool_calls=by_id or without_id,
            needs_call_ids=by_id and not without_id,
            tool_results=not self.is_plain and self._says([user, said, result], mark=_MARK + "result"),
            reasoning=self._says([user, reasoned]),
            generation_prompt=self._asks([user]),
        )

    def _says(self, messages: Messages, tools: Tools = None, mark: str = _MARK) -> bool:
        try:
            return mark in self.render(messages, tools)
        except Refused:
            return False

    def _asks(self, messages: Messages) -> bool:
        try:
            return self.render(messages, ask=True) != self.render(messages)
        except Refused:
            return False


def _common_length(one: str, other: str) -> int:
    """Characters that two texts have in common at their beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _described(tools: list[dict[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, each described by one JSON object:\n"
        f'{lines}\nTo call one, answer with {{"name": NAME, "arguments": {{...}}}}.'
    )


def _with_system(messages: Messages, text: str) -> Messages:
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _without_system(messages: Messages) -> Messages:
    """System texts in front of the next user turn; what no user turn follows becomes one."""
    merged: Messages = []
    waiting = ""
    for message in messages:
        if message["role"] == "system":
            waiting += f"{message['content']}\n\n"
        elif message["role"] == "user":
            merged.append({**message, "content": waiting + message["content"]})
            waiting = ""
        else:
            if waiting:
                merged.append({"role": "user", "content": waiting.rstrip("\n")})
                waiting = ""
            merged.append(message)
    return [*merged, {"role": "user", "content": waiting.rstrip("\n")}] if waiting else merged


def _with_call_ids(messages: Messages) -> Messages:
    """Ids for calls without one, and the same for their results, in order (nine letters and digits: Mistral asks for that)."""
    numbers = iter(range(1, 100000))
    open_calls: list[str] = []
    return [_with_ids(message, numbers, open_calls) for message in messages]


def _with_ids(message: dict[str, Any], numbers: Iterator[int], open_calls: list[str]) -> dict[str, Any]:
    if message.get("tool_calls"):
        calls = [call if "id" in call else {**call, "id": f"call{next(numbers):05d}"} for call in message["tool_calls"]]
        open_calls[:] = [call["id"] for call in calls]
        return {**message, "tool_calls": calls}
    if message["role"] == "tool" and "tool_call_id" not in message and open_calls:
        return {**message, "tool_call_id": open_calls.pop(0)}
    return message
