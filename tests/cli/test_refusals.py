"""What a person gets wrong, before anything is started: one clear error with a fix, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fleetune.cli.main import main

GOOD = {"question": "How many?", "answer": "Two."}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to stand in, with good.jsonl in it; the environment holds no settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FLEETUNE_") and name != "FLEETUNE_CACHE"]:
        monkeypatch.delenv(name)
    write_rows(tmp_path / "good.jsonl", [GOOD] * 3)
    return tmp_path


def write_rows(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def content(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def refused(folder: Path, capsys, *words: str | Path) -> list[str]:
    """The problems that `fleetune train ...` tells; it must exit with 2 and leave the folder as it was."""
    before = content(folder)
    code = main(["train", *map(str, words)])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.out == ""
    assert content(folder) == before
    problems = captured.err.splitlines()
    assert all(problem.startswith("error: ") for problem in problems), problems
    return [problem.removeprefix("error: ") for problem in problems]


def test_an_unknown_flag(folder, tiny_llama, capsys):
    (problem,) = refused(folder, capsys, "--model", tiny_llama, "--data", "good.jsonl", "--learnin-rate", "1")
    assert problem == "there is no flag --learnin-rate: did you mean --learning-rate?"


def test_a_missing_data_file(folder, tiny_llama, capsys):
    (problem,) = refused(folder, capsys, "--model", tiny_llama, "--data", "god.jsonl")
    assert problem == "data 'god.jsonl' does not exist: did you mean good.jsonl?"


def test_a_model_that_does_not_exist(folder, capsys):
    (problem,) = refused(folder, capsys, "--model", "smollm2-135n", "--data", "good.jsonl")
    assert "smollm2-135n" in problem and "did you mean the preset smollm2-135m" in problem


def test_a_micro_batch_that_does_not_divide(folder, tiny_llama, capsys):
    words = ["--model", tiny_llama, "--data", "good.jsonl", "--micro-batch-size", "3"]
    (problem,) = refused(folder, capsys, *words)
    assert problem.startswith("micro_batch_size 3 does not divide global_batch_size 8 (the default): give --micro-batch-size")


def test_data_of_the_wrong_shape(folder, tiny_llama, capsys):
    write_rows(folder / "wrong.jsonl", [{"x": 1, "y": 2}] * 3)
    (problem,) = refused(folder, capsys, "--model", tiny_llama, "--data", "wrong.jsonl")
    assert "the columns x, y fit no shape" in problem and "--columns" in problem


def test_nothing_at_all_is_given(folder, capsys):
    problems = refused(folder, capsys)
    assert [problem.split(":")[0] for problem in problems] == ["no model is given", "no data is given"]


def test_everything_wrong_is_told_at_once(folder, tiny_llama, capsys):
    write_rows(folder / "wrong.jsonl", [{"x": 1}])
    (folder / "taken").write_text("")
    problems = refused(
        folder, capsys, "--model", "nowhere/", "--data", "gone.jsonl", "--validation", "wrong.jsonl", "--run", "taken",
        "--micro-batch-size", "3", "--chat-template", "gone.jinja",
    )  # fmt: skip
    for word in ("nowhere", "gone.jsonl", "wrong.jsonl: the columns x", "taken", "micro_batch_size 3", "gone.jinja"):
        assert sum(word in problem for problem in problems) == 1, word
    assert len(problems) == 6


BAD_FILES = {
    "empty.jsonl": (b"", "empty"),
    "blank.jsonl": (b"\n\n \n", "no row"),
    "no_json.jsonl": (b'{"question": "a"\n{"question"', "line 1"),
    "no_list.json": (b'{"question": "a", "answer": ', "JSON"),
    "latin.jsonl": (b'{"question": "caf\xe9", "answer": "x"}\n', "UTF-8"),
    "utf16.jsonl": ('{"question": "a", "answer": "x"}\n'.encode("utf-16"), "UTF-16"),
    "nul.jsonl": (b'{"question": "a\x00", "answer": "x"}\n', "NUL"),
    "numbers.jsonl": (b"1\n2\n", "an object"),
    "packed.jsonl": (b"\x1f\x8b\x08\x00" + b"\0" * 30, "gzip"),
    "table.parquet": (b"this is no parquet", "arquet"),
    "empty.csv": (b"", "empty"),
    "one_line.csv": (b"question,answer\n", "no row"),
    "picture.png": (b"\x89PNG\r\n", "suffix"),
    "preferences.jsonl": (b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "preferences"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_trained_on_is_refused_by_name(name, folder, tiny_llama, capsys):
    data, word = BAD_FILES[name]
    (folder / name).write_bytes(data)
    (problem,) = refused(folder, capsys, "--model", tiny_llama, "--data", name)
    assert name in problem and word in problem


def test_a_folder_without_rows_and_a_folder_as_a_model(folder, capsys):
    (folder / "empty").mkdir()
    problems = refused(folder, capsys, "--model", "empty", "--data", "empty")
    assert len(problems) == 2
    assert any("folder without files of rows" in problem for problem in problems)
    assert any("config.json" in problem for problem in problems)


def test_a_data_file_as_a_model_and_a_model_as_run_file(folder, tiny_llama, capsys):
    (problem,) = refused(folder, capsys, "--model", "good.jsonl", "--data", "good.jsonl")
    assert "no GGUF" in problem
    (problem,) = refused(folder, capsys, tiny_llama, "--data", "good.jsonl")
    assert "is a folder: give the YAML file" in problem


def test_a_run_file_with_duplicate_keys_and_one_that_is_missing(folder, capsys):
    (folder / "run.yaml").write_text("seed: 1\nmodel: a\nseed: 2\n")
    (problem,) = refused(folder, capsys, "run.yaml")
    assert problem == "run.yaml: seed is given in line 1 and again in line 3: keep one of them"
    (problem,) = refused(folder, capsys, "gone.yaml")
    assert "gone.yaml does not exist" in problem
    (problem,) = refused(folder, capsys, "a.yaml", "b.yaml")
    assert "one RUN.yaml is read" in problem


def test_a_run_folder_that_holds_something_else(folder, tiny_llama, capsys):
    (folder / "photos").mkdir()
    (folder / "photos" / "holiday.jpg").write_bytes(b"x")
    (folder / "link").symlink_to(folder / "photos")
    for run, word in (("photos", "holiday.jpg"), ("link", "link"), ("good.jsonl", "file"), ("good.jsonl/deeper", "no folder")):
        (problem,) = refused(folder, capsys, "--model", tiny_llama, "--data", "good.jsonl", "--run", run)
        assert word in problem and "--run" in problem


def test_resume_without_a_run(folder, tiny_llama, capsys):
    (problem,) = refused(folder, capsys, "--model", tiny_llama, "--data", "good.jsonl", "--resume")
    assert problem.startswith("resume is asked for, and no run is named: give --run")


def test_a_gpu_that_is_not_there(folder, tiny_llama, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (problem,) = refused(folder, capsys, "--model", tiny_llama, "--data", "good.jsonl", "--device", "cuda")
    assert "--device cuda" in problem and "--device cpu" in problem


def test_a_target_that_the_model_does_not_have(folder, tiny_llama, capsys):
    (problem,) = refused(folder, capsys, "--model", tiny_llama, "--data", "good.jsonl", "--lora-targets", "query")
    assert problem.startswith("lora_targets query names no linear layer")


@pytest.mark.parametrize("name", ["a;touch owned.jsonl", "$(touch owned).jsonl", "-rf.jsonl", "a\nb.jsonl", "é ü.jsonl"])
def test_file_names_reach_no_shell_and_need_no_care(name, folder, tiny_llama, capsys):
    write_rows(folder / name, [{"x": 1}])
    (problem,) = refused(folder, capsys, "--model", tiny_llama, f"--data=./{name}")
    assert "fit no shape" in problem
    assert not (folder / "owned").exists() and not (folder / "owned.jsonl").exists()
