"""What is trained comes from the template's own rendering, whatever the template does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetune.data.chat_format import ChatFormat
from fleetune.data.conversations import Conversation
from fleetune.data.encode import Encoded, Encoder
from fleetune.data.literals import restore
from fleetune.data.prompts import Prompter
from fleetune.data.sandbox import Refused
from fleetune.spec.errors import UserError

NAMES = sorted(path.stem for path in (Path(__file__).parent / "templates").glob("*.jinja"))
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}
TOOLS = ({"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}},)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def prepared(tokenizer: Any, conversation: Conversation, **options: Any) -> list[tuple[str, list[str], Encoded]]:
    """(text, trained texts, tokens) of each part, through the same steps as preparation."""
    encoder = Encoder(tokenizer)
    hidden, literals = encoder.literals.hide(conversation)
    parts = [restore(part, literals) for part in encoder.chat_format(tokenizer).parts(hidden, **options)]
    encoded = encoder.encode(parts)
    found = []
    for part, tokens in zip(parts, encoded):
        assert isinstance(tokens, Encoded)
        found.append((part.text, trained_texts(tokenizer, tokens), tokens))
    return found


def trained_texts(tokenizer: Any, encoded: Encoded) -> list[str]:
    borders = np.flatnonzero(np.diff(np.concatenate([[0], encoded.trained.astype(np.int8), [0]])))
    return [tokenizer.decode(encoded.tokens[start:stop]) for start, stop in zip(borders[::2], borders[1::2])]


def trained(tokenizer: Any, *messages: dict[str, Any], tools: Any = None) -> list[list[str]]:
    return [texts for _, texts, _ in prepared(tokenizer, Conversation(tuple(messages), tools))]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"dated"}))  # a date is fixed, see below
@pytest.mark.parametrize("text", ["hello", "two  blanks\n\nand lines\n", "é 中文 🙂", " starts with a blank"])
def test_tokens_are_those_of_the_tokenizers_own_rendering(with_template: Callable[..., Any], name: str, text: str) -> None:
    tokenizer = with_template(name)
    messages = [user(text), assistant(f"{text} too")]
    [(_, _, encoded)] = prepared(tokenizer, Conversation(tuple(messages)))
    assert encoded.tokens.tolist() == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_is_the_answer_and_its_end_and_nothing_else(with_template: Callable[..., Any], name: str) -> None:
    ends = {
        "closes": "<|eot|><|im_end|>",
        "inst": "<|im_end|>",
        "no_system": "<end_of_turn>",
        "dated": "<|eot|>",
        "thinks_first": "<|im_end|>",
    }
    tokenizer = with_template(name)
    [(text, texts, encoded)] = prepared(tokenizer, Conversation((user("hello"), assistant("bye now"))))
    [said] = texts
    assert said.removeprefix("<think>\n\n</think>\n\n").strip() == "bye now" + ends.get(name, "<|im_end|>")
    assert text.count("hello") == 1
    assert (encoded.turns, encoded.ended) == (1, 1)
    assert not encoded.trained[0]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"reasoning_tools", "thinks_first"}))
def test_every_answer_of_a_conversation_is_trained_in_one_sample(with_template: Callable[..., Any], name: str) -> None:
    tokenizer = with_template(name)
    [texts] = trained(tokenizer, user("a"), assistant("one"), user("b"), assistant("two"))
    assert [text.strip().split("<")[0] for text in texts] == ["one", "two"]


def test_a_template_that_rewrites_history_gives_one_sample_for_each_answer(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("reasoning_tools")
    conversation = (user("a"), assistant("one", reasoning_content="r1"), user("b"), assistant("two", reasoning_content="r2"))
    parts = prepared(tokenizer, Conversation(conversation))
    assert [texts for _, texts, _ in parts] == [
        ["<think>\nr1\n</think>\n\none<|im_end|>"],
        ["<think>\nr2\n</think>\n\ntwo<|im_end|>"],
    ]
    assert "r1" not in parts[1][0], "an earlier answer stands in the history as the template writes it there"
    assert "one" in parts[1][0]


def test_calls_results_and_the_answer_after_them_are_one_sample(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("reasoning_tools")
    result = {"role": "tool", "content": "a lamp", "name": "look"}
    [(text, texts, _)] = prepared(
        tokenizer, Conversation((user("a"), assistant("", tool_calls=[CALL]), result, assistant("one")), TOOLS)
    )
    assert '"name": "look"' in text.split("<|im_end|>")[0]
    assert texts == [
        '<think>\n\n</think>\n\n<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call><|im_end|>',
        "<think>\n\n</think>\n\none<|im_end|>",
    ]
    assert "<tool_response>a lamp</tool_response>" in text


def test_what_a_template_cannot_say_is_said_in_the_stated_way(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("no_system")
    result = {"role": "tool", "content": "a lamp"}
    conversation = Conversation(
        (
            {"role": "system", "content": "be brief"},
            user("a"),
            assistant("", tool_calls=[CALL], reasoning_content="hm"),
            result,
            {"role": "tool", "content": "a cat"},
            assistant("one"),
        ),
        TOOLS,
    )
    [(text, texts, _)] = prepared(tokenizer, conversation)
    turns = text.split("<start_of_turn>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == ["user", "model", "user", "model"]
    assert turns[0].startswith("user\nbe brief\n\nYou can call these functions")
    assert '{"name": "look", "description": "d"' in turns[0]
    assert turns[0].endswith("\n\na<end_of_turn>\n")
    assert turns[2] == "user\nTool result:\na lamp\n\nTool result:\na cat<end_of_turn>\n"
    assert texts == [
        '<think>\nhm\n</think>\n\n\n{"name": "look", "arguments": {"at": "é"}}<end_of_turn>',
        "one<end_of_turn>",
    ]
    encoder = Encoder(tokenizer)
    assert encoder.chat_format(tokenizer).notes(conversation) == {"system", "tools", "tool_calls", "tool_results", "reasoning"}


def test_a_template_with_a_role_for_everything_needs_no_notes(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("chatml")
    chat_format = Encoder(tokenizer).chat_format(tokenizer)
    result = {"role": "tool", "content": "a lamp"}
    conversation = Conversation(({"role": "system", "content": "s"}, user("a"), assistant("b"), result, assistant("c")))
    assert chat_format.notes(conversation) == set()
    [texts] = trained(tokenizer, *conversation.messages)
    assert texts == ["b<|im_end|>", "c<|im_end|>"]


def test_calls_get_the_ids_that_a_template_asks_for(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("inst")
    result = {"role": "tool", "content": "a lamp"}
    [(text, texts, _)] = prepared(
        tokenizer, Conversation((user("a"), assistant("", tool_calls=[CALL, CALL]), result, result, assistant("one")))
    )
    assert '"id": "call00001"}{' in texts[0]
    assert '[TOOL_RESULTS] {"id": "call00001", "content": "a lamp"}' in text
    assert '[TOOL_RESULTS] {"id": "call00002", "content": "a lamp"}' in text


def test_a_conversation_that_a_template_refuses_says_why(with_template: Callable[..., Any]) -> None:
    chat_format = Encoder(with_template("inst")).chat_format(with_template("inst"))
    with pytest.raises(Refused, match="roles must alternate"):
        chat_format.parts(Conversation((user("a"), user("b"), assistant("c"))))


def test_answers_in_the_history_of_a_template_that_opens_a_thought_are_trained_after_the_header(
    with_template: Callable[..., Any],
) -> None:
    tokenizer = with_template("thinks_first")
    texts = trained(tokenizer, user("a"), assistant("<think>\nhm\n</think>\n\none"), user("b"), assistant("<b>two</b>"))
    assert texts == [["one<|im_end|>", "<b>two</b><|im_end|>"]]
    notes = Encoder(tokenizer).chat_format(tokenizer).notes(Conversation((user("a"), assistant("b"))))
    assert notes == {"prompt"}
    thinking = Conversation((user("a"), assistant("<think>\nhm\n</think>\n\none")))
    assert Encoder(tokenizer).chat_format(tokenizer).notes(thinking) == {"prompt", "no_reasoning"}


def test_calls_are_given_as_text_and_without_content_where_a_template_wants_that(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("thinks_first")
    [(text, texts, _)] = prepared(tokenizer, Conversation((user("a"), assistant("", tool_calls=[CALL]))))
    assert texts == ['call look {"at": "é"}<|im_end|>']
    assert text.count("<|assistant|>") == 1


def test_an_end_of_text_after_the_last_turn_only_splits_no_conversation(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("closes")
    [texts] = trained(tokenizer, user("a"), assistant("one"), user("b"), assistant("two"))
    assert texts == ["one<|eot|>", "two<|eot|><|im_end|>"]


def test_without_a_generation_prompt_the_header_is_not_trained(with_template: Callable[..., Any]) -> None:
    for answer in ("assistant", "§ 5", "\nabc", "<|"):
        [[text]] = trained(with_template("never_asks"), user("a"), assistant(answer))
        assert text == f"{answer}<|im_end|>"


def test_a_template_that_marks_answers_without_their_end_still_teaches_to_stop(with_template: Callable[..., Any]) -> None:
    assert trained(with_template("marked"), user("a"), assistant("b"), user("c"), assistant("d")) == [
        ["b<|im_end|>", "d<|im_end|>"]
    ]


def test_marks_agree_with_the_masks_of_transformers(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("marked")
    messages = [user("a 🙂"), assistant("b é"), user("c"), assistant("d")]
    [(_, _, encoded)] = prepared(tokenizer, Conversation(tuple(messages)))
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.tokens.tolist() == theirs["input_ids"]
    ours_without_ends = encoded.trained & (encoded.tokens != tokenizer.eos_token_id)
    assert ours_without_ends.astype(int).tolist() == theirs["assistant_masks"]


def test_an_empty_answer_amid_others_is_not_trained(with_template: Callable[..., Any]) -> None:
    assert trained(with_template("chatml"), user("a"), assistant(""), user("b"), assistant("c")) == [["c<|im_end|>"]]


def test_turns_after_the_last_answer_are_left_out(with_template: Callable[..., Any]) -> None:
    [(text, _, _)] = prepared(with_template("chatml"), Conversation((user("a"), assistant("b"), user("never answered"))))
    assert "never answered" not in text


def test_training_on_all_takes_every_token_but_the_first(with_template: Callable[..., Any]) -> None:
    [(text, _, encoded)] = prepared(with_template("chatml"), Conversation((user("a"), assistant("b"))), train_all=True)
    assert encoded.trained.tolist() == [False] + [True] * (len(encoded.tokens) - 1)
    assert text.endswith("<|im_end|>\n")


def test_a_date_in_a_template_is_the_same_tomorrow(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("dated")
    conversation = Conversation((user("a"), assistant("b")))
    [(text, _, _)] = prepared(tokenizer, conversation)
    assert "Today: 26 Jul 2024" in text
    assert Encoder(tokenizer).chat_format(tokenizer).notes(conversation) == {"date"}


def test_a_tokenizer_without_a_template_gets_the_plain_format(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template(None)
    conversation = Conversation(({"role": "system", "content": "s"}, user("q"), assistant("a"), user("r"), assistant("b")))
    [(text, texts, _)] = prepared(tokenizer, conversation)
    assert text == "s\nq\na<|im_end|>r\nb<|im_end|>"
    assert texts == ["a<|im_end|>", "b<|im_end|>"]
    assert Encoder(tokenizer).chat_format(tokenizer).notes(conversation) == {"template"}


def test_a_template_that_is_no_jinja_is_an_error_with_the_flag(with_template: Callable[..., Any]) -> None:
    tokenizer = with_template("chatml", chat_template="{% for %}")
    with pytest.raises(UserError, match="--chat-template FILE"):
        Encoder(tokenizer).chat_format(tokenizer)


def test_tools_may_have_a_template_of_their_own(with_template: Callable[..., Any]) -> None:
    plain, with_tools = (with_template(name).chat_template for name in ("chatml", "reasoning_tools"))
    tokenizer = with_template("chatml", chat_template={"default": plain, "tool_use": with_tools})
    called = (user("a"), assistant("", tool_calls=[CALL]))
    [(text, [said], _)] = prepared(tokenizer, Conversation(called, TOOLS))
    assert "Tools:" in text
    assert "<tool_call>" in said
    assert trained(tokenizer, *called) == [['{"name": "look", "arguments": {"at": "é"}}<|im_end|>']]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"thinks_first"}))
def test_a_prompt_is_the_beginning_of_the_row_it_was_trained_on(with_template: Callable[..., Any], name: str) -> None:
    tokenizer = with_template(name)
    [(_, _, encoded)] = prepared(tokenizer, Conversation((user("hello <|im_end|>"), assistant("bye"))))
    prompt = Prompter(tokenizer)([user("hello <|im_end|>")])
    first = int(np.flatnonzero(encoded.trained)[0])
    assert prompt.tolist() == encoded.tokens[:first].tolist()


def test_a_plain_format_is_a_template_for_everybody(with_template: Callable[..., Any]) -> None:
    """A model without a template is exported with the plain one: transformers must render it to the same text."""
    from fleetune.data.chat_format import plain_template

    tokenizer = with_template(None)
    [(text, _, _)] = prepared(tokenizer, Conversation((user("q"), assistant("a"))))
    tokenizer.chat_template = plain_template(starts_with_bos=False)
    assert tokenizer.apply_chat_template([user("q"), assistant("a")], tokenize=False) == text
    assert ChatFormat(tokenizer.chat_template, dict(tokenizer.special_tokens_map)).render([user("q"), assistant("a")]) == text
