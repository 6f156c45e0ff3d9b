"""Conversations as one model's chat template writes them, and which characters are the assistant's.

What is trained comes from the template's own renderings: from its `{% generation %}` marks, or else from the difference
between the text that asks for an answer (the turns before it, with the generation prompt) and the text with the answer.
What a template cannot say (tools, system text, ...) is found by trying it, and said in one stated way instead.
"""

from __future__ import annotations

import json
from typing import Any

from fleetune.data.abilities import REASONING, Abilities, Messages, Tools, common_length, find_abilities, in_style
from fleetune.data.conversations import Conversation
from fleetune.data.literals import Rendered
from fleetune.data.sandbox import FIXED_DATE, Template

#: Answers that begin differently, to see where an answer begins.
_SIGNS = ("§", "¶")
_RESULT = "Tool result:\n"
#: How things are said that a template has no words for.
NOTES = {
    "template": "the tokenizer has no chat template: prompt, a line end, the response, the end-of-text token",
    "system": "system texts are put in front of the first user turn",
    "tools": "tools are described in the system text, one JSON object a line",
    "tool_calls": "tool calls are written as JSON in the assistant's text, one a line",
    "tool_results": "tool results are written as user turns that begin with 'Tool result:'",
    "reasoning": "reasoning is written in front of the answer, between <think> and </think>",
    "no_reasoning": "the template leaves reasoning out of answers, so it is not trained: give another --chat-template for that",
    "end": "the template has no end of turn: an end-of-text token is put after the last answer",
    "prompt": "the template asks with more than it writes before an answer: answers are trained without what it asks with",
    "date": f"the template writes the date of today: it is {FIXED_DATE:%d %b %Y} in every row",
}


def plain_template(*, starts_with_bos: bool) -> str:
    """The format of a model without a chat template: prompt, a line end, the response, the end-of-text token.

    Whoever lets such a model answer must use it too (as the tokenizer's chat_template): one template for both.
    """
    start = "{{ bos_token }}" if starts_with_bos else ""
    return (
        start + "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    )


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
        end_of_text = str(constants.get("eos_token") or "")
        self._abilities = {
            with_tools: find_abilities(self.render, with_tools=with_tools, end_of_text=end_of_text)
            for with_tools in (False, True)
        }

    def abilities(self, *, with_tools: bool = False) -> Abilities:
        """What the template can say in a conversation without or with tools (a template may differ, or be another one)."""
        return self._abilities[with_tools]

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
            return [Rendered(text, (), is_whole=True)]
        if template.marks_generation:
            text, bounds = template.render(messages, tools)
            return [Rendered(text, tuple(bounds), is_marked=True)]
        parts: list[Rendered] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not ((message["content"] or "").strip() or message.get("tool_calls")):
                continue
            text = self.render(messages[: index + 1], tools)
            answer = (self._answer_start(messages[:index], message, tools, text), len(text))
            history = parts[-1].text.removesuffix(self.abilities(with_tools=bool(tools)).closing) if parts else None
            if history is not None and text.startswith(history):
                earlier = tuple((start, min(end, len(history))) for start, end in parts[-1].answers)
                parts[-1] = Rendered(text, (*earlier, answer))
            else:
                parts.append(Rendered(text, (answer,)))
        return parts

    def prompt(self, messages: Messages, tools: Tools = None) -> str:
        """The text that asks for an answer to `messages` (as `adapt` gives them). Raises Refused.

        A template that takes no notice of `add_generation_prompt`, and yet writes a header before an answer, asks with it.
        """
        asked = self.render(messages, tools, ask=True)
        if self.abilities(with_tools=bool(tools)).generation_prompt:
            return asked
        answered = [self.render([*messages, {"role": "assistant", "content": sign}], tools) for sign in _SIGNS]
        header = answered[0][: common_length(*answered)]
        # Blanks alone are no header: the model has to say them, since nobody else will.
        return header if header.startswith(asked) and header[len(asked) :].strip() else asked

    def _answer_start(self, before: Messages, answer: dict[str, Any], tools: Tools, text: str) -> int:
        """Where the answer begins in `text`: after what asks for it, or, where a template asks with more than it writes
        before an answer, where the text begins to depend on what is answered."""
        asked = self.prompt(before, tools)
        if text.startswith(asked):
            return len(asked)
        sign = next(sign for sign in _SIGNS if not (answer["content"] or "").lstrip().startswith(sign))
        kept = {name: value for name, value in answer.items() if name != "tool_calls"}
        return common_length(text, self.render([*before, {**kept, "content": sign}], tools))

    def adapt(self, conversation: Conversation) -> tuple[Messages, Tools]:
        """Messages and tools as this template can say them."""
        tools = list(conversation.tools) if conversation.tools else None
        said: Messages = [dict(message) for message in conversation.messages]
        if tools and not self.abilities().tools:
            said, tools = _with_system(said, _described(tools)), None
        abilities = self.abilities(with_tools=bool(tools))
        messages: Messages = []
        for message in said:
            message = _spoken(message, abilities)
            if message["role"] == "tool" and not abilities.tool_results:
                result = f"{_RESULT}{message['content']}"
                if messages and messages[-1]["role"] == "user" and messages[-1]["content"].startswith(_RESULT):
                    result = f"{messages.pop()['content']}\n\n{result}"
                message = {"role": "user", "content": result}
            messages.append(message)
        if not abilities.system:
            messages = _without_system(messages)
        if abilities.tool_calls:
            messages = in_style(messages, abilities.tool_calls)
        return messages, tools

    def notes(self, conversation: Conversation) -> set[str]:
        """What of this conversation is said otherwise than it stands in the row; names of `NOTES`."""
        abilities = self.abilities(with_tools=bool(conversation.tools) and self.abilities().tools)
        roles = {message["role"] for message in conversation.messages}
        calls = any("tool_calls" in message for message in conversation.messages)
        reasons = any("reasoning_content" in message for message in conversation.messages)
        thinks = any("</think>" in message["content"] for message in conversation.messages if message["role"] == "assistant")
        needed = {
            "template": self.is_plain,
            "system": "system" in roles and not abilities.system,
            "tools": bool(conversation.tools) and not self.abilities().tools,
            "tool_calls": calls and not abilities.tool_calls,
            "tool_results": "tool" in roles and not abilities.tool_results,
            "reasoning": reasons and not abilities.reasoning and abilities.inline_reasoning,
            "no_reasoning": not abilities.inline_reasoning and (thinks or (reasons and not abilities.reasoning)),
            "prompt": not abilities.asks_as_it_writes,
            "date": "strftime_now" in self._template.source,
        }
        return {name for name, is_needed in needed.items() if is_needed}


def _spoken(message: dict[str, Any], abilities: Abilities) -> dict[str, Any]:
    """One message, its reasoning and its tool calls in words where the template has no place for them."""
    reasoning = message.pop("reasoning_content", None)
    if reasoning and abilities.reasoning:
        message.update({name: reasoning for name in REASONING})
    elif reasoning:
        message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
    if message.get("tool_calls") and not abilities.tool_calls:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.pop("tool_calls")]
        message["content"] = "\n".join([message["content"], *calls] if message["content"] else calls)
    return message


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
