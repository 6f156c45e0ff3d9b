from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetune.data.conversations import Conversation, Text, read_row
from fleetune.data.shapes import find_shape
from fleetune.spec.errors import UserError


def shape_of(row: dict[str, Any], forced: str = "auto", **mapped: str) -> Any:
    return find_shape([row], forced=forced, mapped=mapped, where="FILE")


def read(row: dict[str, Any], forced: str = "auto", **mapped: str) -> Any:
    return read_row(row, shape_of(row, forced, **mapped))


def said(row: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in read(row, **options).messages]


def refused(row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(ValueError) as raised:
        read(row, **options)
    return str(raised.value)


USER = {"role": "user", "content": "q"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
FOUND = {
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "messages": {"messages": [USER, {"role": "assistant", "content": "a"}]},
    "messages in conversations": {"conversations": [USER, {"role": "assistant", "content": "a"}]},
    "messages as json": {"messages": json.dumps([USER, {"role": "assistant", "content": "a"}])},
    "prompt and completion": {"prompt": "q", "completion": "a"},
    "prompt and response": {"prompt": "q", "response": "a", "id": 7},
    "question and answer": {"question": "q", "answer": "a"},
    "capitals": {"Question": "q", "Answer": "a"},
    "lists of messages": {"prompt": [USER], "completion": [{"role": "assistant", "content": "a"}]},
}


@pytest.mark.claim(
    "H41",
    command="fleetune train --data rows.csv --columns prompt=instruction,response=output",
    seen="its CSV and Parquet columns are read with a mapping",
)
@pytest.mark.parametrize("name", FOUND)
def test_a_shape_is_found_by_looking(name: str) -> None:
    assert said(FOUND[name]) == [("user", "q"), ("assistant", "a")]
    expected = name.split()[0] if name.split()[0] in ("alpaca", "sharegpt", "messages") else "prompt"
    assert shape_of(FOUND[name]).name == expected


def test_plain_text_is_text() -> None:
    assert read({"text": "hello", "url": "x"}) == Text("hello")


def test_an_alpaca_row_puts_its_input_under_the_instruction_and_keeps_system_and_history() -> None:
    row = {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["q0", "a0"]]}
    assert said(row) == [
        ("system", "s"),
        ("user", "q0"),
        ("assistant", "a0"),
        ("user", "q\n\ni"),
        ("assistant", "a"),
    ]


def test_columns_can_be_given_their_roles() -> None:
    row = {"body": "q", "reply": "a", "context": "s", "note": "i", "text": "t"}
    mapped = {"prompt": "body", "response": "reply", "system": "context", "input": "note"}
    assert said(row, **mapped) == [("system", "s"), ("user", "q\n\ni"), ("assistant", "a")]
    assert read(row, text="note") == Text("i")
    assert said({"body": "q", "answer": "a"}, prompt="body") == [("user", "q"), ("assistant", "a")]
    assert said({"log": FOUND["sharegpt"]["conversations"]}, messages="log") == [("user", "q"), ("assistant", "a")]


def test_a_shape_can_be_forced() -> None:
    row = {**FOUND["alpaca"], "text": "t"}
    assert read(row, forced="text") == Text("t")
    assert read(row) != Text("t")


def test_columns_that_fit_nothing_are_named_with_what_was_expected_and_the_flag() -> None:
    with pytest.raises(UserError) as raised:
        shape_of({"foo": 1, "bar": "x"})
    message = str(raised.value)
    assert "FILE: the columns foo, bar fit no shape" in message
    assert "instruction and output" in message
    assert "--columns prompt=COLUMN,response=COLUMN" in message
    with pytest.raises(UserError, match=r"fit no shape\. Expected: instruction and output .*\[alpaca\]"):
        shape_of(FOUND["question and answer"], forced="alpaca")


def test_a_column_that_no_row_has_is_named_with_those_seen() -> None:
    with pytest.raises(
        UserError, match="no row has the column 'qestion' that --columns gives to prompt: the columns are question"
    ):
        shape_of({"question": "q", "answer": "a"}, prompt="qestion", response="answer")


def test_preferences_are_refused(shared_data: Path) -> None:
    row = json.loads((shared_data / "dpo_en_demo.json").read_text())[0]
    with pytest.raises(UserError, match="preferences"):
        shape_of(row)


def test_messages_keep_tools_calls_results_and_reasoning() -> None:
    row = {
        "tools": json.dumps([{"name": "f", "description": "d", "parameters": {}}]),
        "messages": [
            {"role": "developer", "content": "s"},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "hm"},
            {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "1", "name": "f"},
            {"role": "assistant", "content": "a"},
        ],
    }
    found = read(row)
    assert found.tools == ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}},)
    assert found.messages == (
        {"role": "system", "content": "s"},
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "1"}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": "a"},
    )


def test_sharegpt_calls_and_observations_become_tool_calls_and_results() -> None:
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": {"y": 2}},
        {"from": "gpt", "value": "a"},
    ]
    found = read({"conversations": turns, "tools": "[]"})
    assert found.tools is None
    assert found.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert found.messages[2] == {"role": "tool", "content": '{"y": 2}'}


def test_a_function_call_that_is_no_json_stays_text() -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f(x)"}]
    assert said({"conversations": turns}) == [("user", "q"), ("assistant", "f(x)")]


CAUSES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no answer": ({}, {"answer": ""}, "has no answer: the column 'answer' is empty"),
    "blank answer": ({}, {"answer": " \n"}, "has no answer"),
    "null answer": ({}, {"answer": None}, "missing or null"),
    "number": ({}, {"answer": 42}, "holds a number where text was expected"),
    "object": ({}, {"answer": {"text": "a"}}, "holds an object where text was expected"),
    "no prompt": ({}, {"question": ""}, "has no prompt"),
    "nul": ({}, {"answer": "a\0b"}, "NUL"),
    "half a character": ({}, {"question": "a\ud800"}, "lone surrogate"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_row_that_cannot_be_used_says_why(name: str) -> None:
    _, change, cause = CAUSES[name]
    row = {"question": "q", "answer": "a", **change}
    with pytest.raises(ValueError, match=cause):
        read_row(row, shape_of({"question": "q", "answer": "a"}))


TURNS: dict[str, tuple[Any, str]] = {
    "none": ([], "empty list"),
    "text": ("hello", "holds text where a list of turns"),
    "no assistant": ([USER], "no turn of the assistant"),
    "empty assistant": ([USER, {"role": "assistant", "content": ""}], "every turn of the assistant .* is empty"),
    "unknown role": ([USER, {"role": "narrator", "content": "a"}], "turn 2 has the role 'narrator'"),
    "no role": ([{"content": "a"}], "turn 1 has the role None"),
    "turn is text": (["a"], "turn 1 is text"),
    "image": ([{"role": "user", "content": [{"type": "image"}]}], r"part that is not text \(image\)"),
    "number": ([{"role": "user", "content": 3}], "turn 1 holds a number"),
    "call without name": ([USER, {"role": "assistant", "tool_calls": [{}]}], "tool call without a name"),
    "nul in a call": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": ["\0"]}}}]}],
        "NUL",
    ),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_that_cannot_be_used_say_why(name: str) -> None:
    turns, cause = TURNS[name]
    with pytest.raises(ValueError, match=cause):
        read_row({"messages": turns}, shape_of(FOUND["messages"]))


def test_a_backslash_u0000_in_words_is_no_nul() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "\\u0000"}}}
    assert isinstance(read({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}), Conversation)


def test_one_broken_row_among_many_does_not_hide_the_shape() -> None:
    rows = [{"foo": 1}, *[{"question": "q", "answer": "a"}] * 5]
    assert find_shape(rows, forced="auto", mapped={}, where="FILE").name == "prompt"
