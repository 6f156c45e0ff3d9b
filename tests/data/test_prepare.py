"""The whole preparation on small files with a real tokenizer: what is kept, what is set aside, what is done only once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.material import Prepare, left_behind, rows, samples, write
from fleetune.data.prepare import DataRequest, prepare_data
from fleetune.data.preview import example
from fleetune.data.store import TokenStore
from fleetune.spec.errors import UserError
from fleetune.spec.run_spec import RowsSection


def test_every_usable_row_is_prepared_once_and_every_other_is_set_aside(tmp_path: Path, prepare: Prepare) -> None:
    broken = ["{nope", {"question": "x", "answer": ""}, {"question": "x", "answer": 4}]
    file = write(tmp_path / "a.jsonl", [*rows(3), *broken, "", *rows(2, 3)])
    prepared = prepare(file, quarantine=tmp_path / "quarantine.jsonl")
    assert samples(prepared.store) == [f"a.jsonl:{number}" for number in (1, 2, 3, 8, 9)]
    set_aside = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["line"], entry["file"]) for entry in set_aside] == [(n, n, str(file)) for n in (4, 5, 6)]
    assert "invalid JSON" in set_aside[0]["cause"]
    assert set_aside[1]["cause"] == "has no answer: the column 'answer' is empty"
    assert all(entry["version"] == 1 and entry["kind"] == "bad" for entry in set_aside)
    assert (prepared.report.rows, prepared.report.bad_rows) == (5, 3)
    assert sum(prepared.report.causes.values()) == 3


@pytest.mark.claim(
    "H39",
    command="fleetune train",
    seen="rows are tokenised once into a memory-mapped store; the state of the data is one integer",
)
@pytest.mark.claim(
    "X31",
    command="fleetune train",
    seen="shapes found by looking, packed, cached by content",
)
def test_a_second_preparation_only_looks_it_up(tmp_path: Path, prepare: Prepare, tiny_tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", [*rows(8), "broken"])
    first = prepare(file, validation_share=0.25, quarantine=tmp_path / "first.jsonl")
    request = DataRequest(
        data=(str(file),),
        tokenizer_fingerprint="tiny",
        cache=tmp_path / "cache",
        max_bad_share=0.5,
        validation_share=0.25,
        quarantine=tmp_path / "second.jsonl",
    )

    def never() -> Any:
        raise AssertionError("the tokenizer was asked for")

    assert prepare_data(request, never) == first
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "second.jsonl").read_bytes()


def test_another_seed_or_length_does_not_tokenise_again(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", rows(30))
    first = prepare(file)
    asked: list[int] = []
    for options in ({"seed": 1}, {"sequence_length": 64}, {"packing": False}, {"validation_share": 0.2}):
        other = prepare(file, progress=asked.append, **options)
        assert other.fingerprint != first.fingerprint
    assert asked == []


@pytest.mark.parametrize("change", ["content", "tokenizer_fingerprint", "columns", "train_on"])
def test_what_makes_other_tokens_is_never_taken_from_the_cache(tmp_path: Path, prepare: Prepare, change: str) -> None:
    file = write(tmp_path / "a.jsonl", [{"a": "what", "b": "why", "c": "who"}] * 3)
    options: dict[str, Any] = {"columns": {"prompt": "a", "response": "b"}}
    first = prepare(file, **options)
    asked: list[int] = []
    if change == "content":
        write(file, [{"a": "what", "b": "who", "c": "who"}] * 3)
    others = {
        "content": {},
        "tokenizer_fingerprint": {"tokenizer_fingerprint": "other"},
        "columns": {"columns": {"prompt": "a", "response": "c"}},
        "train_on": {"train_on": "all"},
    }
    second = prepare(file, progress=asked.append, **{**options, **others[change]})
    assert asked
    assert second.store != first.store
    assert (second.fingerprint == first.fingerprint) == (change == "tokenizer_fingerprint"), "a fingerprint is of the content"


def test_the_same_content_elsewhere_is_the_same_data(tmp_path: Path, prepare: Prepare) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = prepare(write(tmp_path / "a.jsonl", rows(9)))
    assert prepare(write(tmp_path / "elsewhere" / "a.jsonl", rows(9))).fingerprint == first.fingerprint


def test_too_many_bad_rows_stop_the_run_with_causes_and_are_written_down_all_the_same(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", [*rows(7), "x", "y", {"question": "q", "answer": None}])
    with pytest.raises(UserError) as raised:
        prepare(file, max_bad_share=0.1, quarantine=tmp_path / "quarantine.jsonl")
    message = str(raised.value)
    assert "3 of 10 rows cannot be used, more than max_bad_share 0.1 allows" in message
    assert f"the first at {file}, line 8" in message
    assert "2 × invalid JSON" in message
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 3
    share = float(message.rsplit(" ", 1)[1])
    assert prepare(file, max_bad_share=share).report.rows == 7, "the share that the message names is large enough"


def test_without_bad_rows_no_quarantine_is_left(tmp_path: Path, prepare: Prepare) -> None:
    quarantine = write(tmp_path / "quarantine.jsonl", ["of an earlier attempt"])
    prepare(write(tmp_path / "a.jsonl", rows(3)), quarantine=quarantine)
    assert not quarantine.exists()


def test_rows_that_are_dropped_for_their_length_are_written_down(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", [*rows(3), {"question": "long", "answer": "word " * 400}])
    prepared = prepare(file, sequence_length=128, quarantine=tmp_path / "quarantine.jsonl", max_bad_share=0.0)
    [entry] = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert (entry["kind"], entry["row"]) == ("over_long", 4)
    assert "more than sequence_length 128: dropped" in entry["cause"]
    assert prepared.report.over_long["dropped"] == 1
    assert any("1 rows longer than sequence_length 128 are left out" in warning for warning in prepared.report.warnings)


def test_only_over_long_rows_are_an_error(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", [{"question": "long", "answer": "word " * 400}] * 3)
    with pytest.raises(UserError, match=r"all 3 are longer than sequence_length 64 \(the longest has \d+ tokens\)"):
        prepare(file, sequence_length=64)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_an_empty_file_is_an_error(tmp_path: Path, prepare: Prepare, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=r"a\.json: there is no row in it"):
        prepare(tmp_path / "a.json")


def test_nothing_but_bad_rows_is_an_error_whatever_share_is_allowed(tmp_path: Path, prepare: Prepare) -> None:
    with pytest.raises(UserError, match="2 of 2 rows cannot be used"):
        prepare(write(tmp_path / "a.jsonl", ["x", "y"]), max_bad_share=1.0)


def test_one_row_is_enough(tmp_path: Path, prepare: Prepare) -> None:
    assert prepare(write(tmp_path / "a.jsonl", rows(1))).num_sequences == 1


def test_the_problems_of_all_files_are_told_at_once(tmp_path: Path, prepare: Prepare) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [{"foo": "x"}]) for name in "ab"]
    with pytest.raises(UserError) as raised:
        prepare(*files)
    assert [problem.split(":")[0] for problem in raised.value.problems] == [str(file) for file in files]
    with pytest.raises(UserError, match="the role 'promt', which is none"):
        prepare(files[0], columns={"promt": "foo"})


def test_held_out_rows_of_a_share_and_the_others_are_all(tmp_path: Path, prepare: Prepare) -> None:
    prepared = prepare(write(tmp_path / "a.jsonl", rows(40)), validation_share=0.2)
    kept, held_out = samples(prepared.store), samples(prepared.validation_store)
    assert len(held_out) == 8
    assert sorted(kept + held_out) == sorted(f"a.jsonl:{number}" for number in range(1, 41))
    assert prepared.report.held_out_rows == 8
    assert prepared.validation_report is not None
    assert prepared.validation_report.documents == 8


def test_held_out_rows_of_a_file_are_in_its_order(tmp_path: Path, prepare: Prepare) -> None:
    held_out = write(tmp_path / "v.jsonl", rows(20))
    prepared = prepare(write(tmp_path / "a.jsonl", rows(5)), validation=(str(held_out),))
    assert prepared.validation_store is not None
    store = TokenStore.open(prepared.validation_store)
    assert store.sample_ids(range(20)) == tuple(f"v.jsonl:{number}" for number in range(1, 21))
    assert len(samples(prepared.store)) == 5


def test_held_out_rows_that_are_trained_on_too_are_told(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", rows(5))
    report = prepare(file, validation=(str(file),)).validation_report
    assert report is not None
    assert any("is trained on too" in warning for warning in report.warnings)


def test_sources_are_mixed_by_their_weights(tmp_path: Path, prepare: Prepare) -> None:
    files = [write(tmp_path / "a.jsonl", rows(10)), write(tmp_path / "b.jsonl", rows(10))]
    found = samples(prepare(*files, data_weights=(2.0, 0.5)).store)
    assert len([sample for sample in found if sample.startswith("a.")]) == 20
    assert len([sample for sample in found if sample.startswith("b.")]) == 5


def test_the_report_counts_what_the_rows_hold(tmp_path: Path, prepare: Prepare, with_template: Callable[..., Any]) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"))]
    content = [
        {"messages": turns},
        {"messages": [*turns, *turns]},
        {"messages": [{"role": "user", "content": "<|im_end|> and <|im_start|>"}, turns[1]]},
    ]
    file = write(tmp_path / "a.jsonl", content)
    report = prepare(file, tokenizer=with_template("reasoning_tools")).report
    assert (report.rows, report.turns, report.turns_ended, report.rewritten, report.documents) == (3, 4, 4, 1, 4)
    assert (report.rows_with_literals, report.literals, report.double_bos) == (1, 2, 0)
    assert report.files[0].shape == "messages"
    assert sum(count for _, count in report.lengths) == 4
    assert report.tokens == sum(file.tokens for file in report.files)
    assert 0 < report.trained_share < 1
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["ended_share"] == 1.0
    assert any("writes earlier turns differently in 1 rows" in warning for warning in plain["warnings"])


def test_a_template_that_never_ends_a_turn_gets_an_end_and_that_is_told(
    tmp_path: Path, prepare: Prepare, with_template: Callable[..., Any]
) -> None:
    endless = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    report = prepare(write(tmp_path / "a.jsonl", rows(3)), tokenizer=with_template("chatml", chat_template=endless)).report
    assert (report.turns, report.turns_ended) == (3, 3)
    assert "end" in report.notes
    again = [{"instruction": "a", "output": "b", "history": [["c", "d"]]}]
    report = prepare(write(tmp_path / "b.jsonl", again), tokenizer=with_template("chatml", chat_template=endless)).report
    assert (report.turns, report.turns_ended) == (2, 1)
    assert any("only 1 of 2 answers end with a trained end-of-turn token" in warning for warning in report.warnings)


def test_rows_that_the_template_refuses_are_bad_rows_with_its_reason(
    tmp_path: Path, prepare: Prepare, with_template: Callable[..., Any]
) -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    file = write(tmp_path / "a.jsonl", [{"messages": twice[1:]}, {"messages": twice}])
    report = prepare(file, tokenizer=with_template("inst")).report
    assert report.bad_examples[0]["cause"] == "the chat template refuses it: roles must alternate user, assistant"


def test_a_template_that_leaves_all_answers_out_stops_the_run(
    tmp_path: Path, prepare: Prepare, with_template: Callable[..., Any]
) -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="has no trained token: the chat template leaves the answer out"):
        prepare(write(tmp_path / "a.jsonl", rows(3)), tokenizer=with_template("chatml", chat_template=silent))


def test_an_example_shows_the_row_and_its_trained_part(tmp_path: Path, prepare: Prepare, tiny_tokenizer: Any) -> None:
    prepared = prepare(write(tmp_path / "a.jsonl", rows(3)))
    shown = example(TokenStore.open(prepared.store), tiny_tokenizer, 1)
    assert shown.sample == "a.jsonl:2"
    assert "".join(segment.text for segment in shown.segments) == (
        "<|im_start|>user\nwhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\nit is 2<|im_end|>\n"
    )
    assert [segment.text for segment in shown.segments if segment.trained] == ["it is 2<|im_end|>"]
    with pytest.raises(IndexError, match="there are 3 documents"):
        example(TokenStore.open(prepared.store), tiny_tokenizer, 3)


def test_a_request_has_every_field_of_the_spec(tmp_path: Path) -> None:
    rows_section = RowsSection(data=("a",), columns={"text": "b"}, sequence_length=9, over_long="cut", packing=False)
    request = DataRequest.of_rows(rows_section, tokenizer_fingerprint="x", seed=7, offline=True)
    shared = set(RowsSection.model_fields) - {"num_workers"}
    assert {name: getattr(request, name) for name in shared} == {name: getattr(rows_section, name) for name in shared}


def test_no_data_is_an_error(prepare: Prepare) -> None:
    with pytest.raises(UserError, match="add --data FILE"):
        prepare()


def test_the_system_text_is_told_where_all_conversations_begin_with_one(tmp_path: Path, prepare: Prepare) -> None:
    def report_of(name: str, *systems: str) -> str:
        made = [{**row, "system": system} for row, system in zip(rows(len(systems)), systems, strict=True)]
        return prepare(write(tmp_path / name, made)).report.system

    assert report_of("same.jsonl", "Be brief.", "Be brief.") == "Be brief."
    assert report_of("differing.jsonl", "Be brief.", "Be long.", "Be brief.") == ""
    assert report_of("some.jsonl", "Be brief.", "") == ""
    assert prepare(write(tmp_path / "none.jsonl", rows(2))).report.system == ""
