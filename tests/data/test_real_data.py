"""The real files with a real model's tokenizer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetune.data.prepare import DataRequest, PreparedData, prepare_data
from fleetune.data.preview import example
from fleetune.data.store import TokenStore
from fleetune.spec.errors import UserError

FILES = {
    "gsm8k_train.jsonl": ("prompt", 7473),
    "alpaca_en_demo.json": ("alpaca", 999),
    "alpaca_zh_demo.json": ("alpaca", 1000),
    "glaive_toolcall_en_demo.json": ("sharegpt", 300),
    "c4_demo.jsonl": ("text", 300),
    "wiki_demo.txt": ("text", 30),
}


@pytest.fixture(scope="module")
def prepared(shared_data: Path, smollm_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedData]:
    cache = tmp_path_factory.mktemp("cache")
    return {
        name: prepare_data(
            DataRequest(data=(str(shared_data / name),), tokenizer_fingerprint="smollm2", cache=cache, validation_share=0.05),
            lambda: smollm_tokenizer,
        )
        for name in FILES
    }


def documents(prepared: PreparedData) -> list[tuple[np.ndarray, np.ndarray]]:
    store = TokenStore.open(prepared.store)
    return [store.document(number) for number in range(store.num_documents)]


@pytest.mark.parametrize("name", FILES)
def test_every_row_of_a_real_file_is_used(prepared: dict[str, PreparedData], name: str) -> None:
    shape, num_rows = FILES[name]
    report = prepared[name].report
    assert report.files[0].shape == shape
    assert (report.rows, report.bad_rows) == (num_rows, 0)
    assert report.turns == report.turns_ended
    assert report.held_out_rows == round(0.05 * num_rows)
    assert report.efficiency > 0.95
    assert all(trained.any() and not trained[0] for _, trained in documents(prepared[name]))


def test_a_question_is_trained_on_its_answer_and_the_end_of_turn(
    prepared: dict[str, PreparedData], smollm_tokenizer: Any, shared_data: Path
) -> None:
    store = TokenStore.open(prepared["gsm8k_train.jsonl"].store)
    lines = (shared_data / "gsm8k_train.jsonl").read_text().splitlines()
    for number in range(0, store.num_documents, 500):
        row = json.loads(lines[int(store.sample_id(number).split(":")[1]) - 1])
        before, said, after = example(store, smollm_tokenizer, number).segments
        assert before.text == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert said.text == f"{row['answer']}<|im_end|>"
        assert (after.text, after.trained) == ("\n", False)


def test_tokens_are_those_of_transformers(prepared: dict[str, PreparedData], smollm_tokenizer: Any, shared_data: Path) -> None:
    rows = json.loads((shared_data / "alpaca_zh_demo.json").read_text())
    store = TokenStore.open(prepared["alpaca_zh_demo.json"].store)
    for number in range(0, store.num_documents, 40):
        row = rows[int(store.sample_id(number).split(":")[1]) - 1]
        asked = row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "")
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        expected = smollm_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert store.document(number)[0].tolist() == expected


def test_only_the_assistants_turns_and_calls_are_trained(
    prepared: dict[str, PreparedData], smollm_tokenizer: Any, shared_data: Path
) -> None:
    rows = json.loads((shared_data / "glaive_toolcall_en_demo.json").read_text())
    store = TokenStore.open(prepared["glaive_toolcall_en_demo.json"].store)
    calls = 0
    for number in range(0, store.num_documents, 5):
        row = rows[int(store.sample_id(number).split(":")[1]) - 1]
        segments = example(store, smollm_tokenizer, number).segments
        own = [turn for turn in row["conversations"] if turn["from"] in ("gpt", "function_call")]
        said = [segment.text.removesuffix("<|im_end|>") for segment in segments if segment.trained]
        for turn, text in zip(own, said, strict=True):
            if turn["from"] == "function_call":
                calls += 1
                assert json.loads(text) == json.loads(turn["value"])
            else:
                assert text == turn["value"]
        if row["tools"] not in ("", "[]"):
            assert json.loads(row["tools"])[0]["name"] in segments[0].text
    assert calls > 10


def test_text_is_cut_into_pieces_that_lose_nothing(
    prepared: dict[str, PreparedData], smollm_tokenizer: Any, shared_data: Path
) -> None:
    lines = (shared_data / "wiki_demo.txt").read_text().splitlines()
    store = TokenStore.open(prepared["wiki_demo.txt"].store)
    by_row: dict[int, list[int]] = {}
    for number in range(store.num_documents):
        tokens, trained = store.document(number)
        row = int(store.sample_id(number).split(":")[1].split("#")[0])
        by_row.setdefault(row, [int(tokens[0])]).extend(tokens[trained].tolist())
    for row, tokens in by_row.items():
        text = lines[row - 1]
        assert tokens == [*smollm_tokenizer(text, add_special_tokens=False)["input_ids"], smollm_tokenizer.eos_token_id]


def test_what_is_prepared_is_found_again_at_once(
    prepared: dict[str, PreparedData], shared_data: Path, smollm_tokenizer: Any
) -> None:
    request = DataRequest(
        data=(str(shared_data / "gsm8k_train.jsonl"),),
        tokenizer_fingerprint="smollm2",
        cache=prepared["gsm8k_train.jsonl"].store.parents[1],
        validation_share=0.05,
    )
    began = time.monotonic()
    assert prepare_data(request, lambda: pytest.fail("tokenised again")) == prepared["gsm8k_train.jsonl"]
    assert time.monotonic() - began < 2.0


def test_preferences_are_refused_for_now(shared_data: Path, smollm_tokenizer: Any, tmp_path: Path) -> None:
    request = DataRequest(data=(str(shared_data / "dpo_en_demo.json"),), tokenizer_fingerprint="x", cache=tmp_path)
    with pytest.raises(UserError, match=r"dpo_en_demo\.json holds preferences \(chosen, rejected\)"):
        prepare_data(request, lambda: smollm_tokenizer)
