"""`fleetune data`: what a person sees of their rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from journeys.journey import write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "rows.jsonl", 6)
    lines = (folder / "rows.jsonl").read_text().splitlines()
    bad = [*lines[:2], '{"question": "no answer"}', "{broken", *lines[2:], json.dumps({"question": "q " * 90, "answer": "a"})]
    (folder / "bad.jsonl").write_text("\n".join(bad) + "\n")
    return folder


@pytest.fixture
def fleetune(command, monkeypatch, folder):
    monkeypatch.chdir(folder)
    return command


def test_inspect_tells_what_is_trained_and_marks_it(fleetune, tiny_llama):
    done = fleetune("data", "inspect", "rows.jsonl", "--model", tiny_llama)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "json, prompt (prompt=question, response=answer), 6 rows" in text
    assert "6, of which end with a trained end of turn 6" in text
    assert "⟦0 clips.<|im_end|>⟧" in done.stdout
    assert "\x1b" not in done.stdout, "no colours where nobody sees them"


def test_inspect_refuses_what_a_run_would_refuse_and_still_reports(fleetune, tiny_llama):
    words = ["bad.jsonl", "--model", tiny_llama, "--sequence-length", "64"]
    done = fleetune("data", "inspect", *words, "--json")
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout)
    assert (said["rows"], said["bad_rows"], said["over_long"]["rows"]) == (7, 2, 1)
    assert {example["line"] for example in said["bad_examples"]} == {3, 4}
    assert "2 of 9 rows cannot be used" in said["refused"][0] and "--max-bad-share" in done.stderr
    allowed = fleetune("data", "inspect", *words, "--max-bad-share", "0.5")
    assert allowed.returncode == 0, allowed.stderr
    assert "bad.jsonl, line 4:" in allowed.stdout and "1, which are dropped" in " ".join(allowed.stdout.split())


def test_preview_shows_the_asked_rows_with_their_parts(fleetune, tiny_llama):
    words = ["data", "preview", "rows.jsonl", "--model", tiny_llama, "--json"]
    done = fleetune(*words, "--first", "2", "--count", "2")
    assert done.returncode == 0, done.stderr
    examples = json.loads(done.stdout)["examples"]
    assert [example["sample"] for example in examples] == ["rows.jsonl:3", "rows.jsonl:4"]
    trained = ["".join(part["text"] for part in example["segments"] if part["trained"]) for example in examples]
    assert trained[0].startswith("4 clips.<|im_end|>")
    late = fleetune(*words, "--first", "99")
    assert late.returncode == 2 and "there are 6 rows to show" in late.stderr


def test_what_is_missing_is_told_before_anything_is_read(fleetune, tiny_llama):
    for words, says in (
        (["inspect", "gone.jsonl", "--model", tiny_llama], "'gone.jsonl' does not exist"),
        (["inspect", "rows.jsonl"], "no model is given"),
        (["inspect", "--model", tiny_llama], "no data is given"),
        (["look", "rows.jsonl"], "fleetune data inspect or fleetune data preview"),
    ):
        done = fleetune("data", *words)
        assert done.returncode == 2 and says in done.stderr
