"""The example task: what `make quickstart` trains and measures on."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "home_control" / "make.py"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("home_control_make", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents(rows: list[dict], role: str) -> list[str]:
    return [turn["content"] for row in rows for turn in row["messages"] if turn["role"] == role]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        files.append(tmp_path / "new" / f"{name}.jsonl")
        done = run("--seed", seed, "--rows", 50, "--out", files[-1])
        assert done.returncode == 0, done.stderr
    first, second, other = (file.read_bytes() for file in files)
    assert first == second != other
    assert first.count(b"\n") == 50


def test_no_request_and_no_answer_of_another_seed_is_one_of_the_training_seed(make: ModuleType) -> None:
    training = list(make.rows(make.TRAINING_SEED, 10_000))
    requests, answers = set(contents(training, "user")), set(contents(training, "assistant"))
    for seed in (*range(1, 12), -1, 2**31, 10**12):
        other = list(make.rows(seed, 1_000))
        assert requests.isdisjoint(contents(other, "user")), seed
        assert answers.isdisjoint(contents(other, "assistant")), seed


def test_rows_of_one_seed_never_repeat(make: ModuleType) -> None:
    for seed in (make.TRAINING_SEED, 1):
        requests = contents(list(make.rows(seed, 20_000)), "user")
        assert len(set(requests)) == len(requests) == 20_000


def test_every_answer_is_one_line_of_json_that_a_controller_can_read(make: ModuleType) -> None:
    actions = {"on", "off", "open", "close", "set", "play"}
    for answer in contents(list(make.rows(5, 3_000)), "assistant"):
        assert "\n" not in answer
        fields = json.loads(answer)
        assert list(fields)[:3] == ["action", "device", "room"]
        assert set(fields) <= {"action", "device", "room", "value", "at", "in", "for"}
        assert fields["action"] in actions and fields["room"] in make.ROOMS.values()
        assert ("value" in fields) == (fields["action"] in ("set", "play"))
        assert len({"at", "in", "for"} & set(fields)) <= 1


def test_numbers_in_words_and_in_digits_mean_the_same(make: ModuleType) -> None:
    meant: dict[str, set[int]] = {}
    for row in make.rows(0, 3_000):
        said, fields = row["messages"][1]["content"].lower(), json.loads(row["messages"][2]["content"])
        for words, value in (("twenty-one degrees", 21), ("21 degrees", 21), ("forty percent", 40), ("40%", 40)):
            if f" {words}" in said:
                meant.setdefault(words, set()).add(fields["value"])
                assert fields["value"] == value
    assert set(meant) == {"twenty-one degrees", "21 degrees", "forty percent", "40%"}


@pytest.mark.parametrize(
    ("number", "words"), [(0, "zero"), (13, "thirteen"), (20, "twenty"), (45, "forty-five"), (99, "ninety-nine")]
)
def test_numbers_are_said_as_people_say_them(make: ModuleType, number: int, words: str) -> None:
    assert make.in_words(number) == words


def test_a_seed_that_has_no_more_rows_says_so(make: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOMS", "SWITCHED", "MOVED"):
        monkeypatch.setattr(make, name, dict(list(getattr(make, name).items())[:2]))
    for name in ("ORDERS", "WISHES"):
        monkeypatch.setattr(make, name, {"open": getattr(make, name)["open"][:1]})
    for name in ("ASIDES", "POLITE", "MUSIC", "PERCENTS", "DEGREES", "MINUTES", "HOURS"):
        monkeypatch.setattr(make, name, getattr(make, name)[:1])
    with pytest.raises(ValueError, match="fewer --rows"):
        list(make.rows(0, 100_000))


@pytest.mark.parametrize("rows", ["0", "-5", "many"])
def test_a_number_of_rows_that_cannot_be_is_refused(tmp_path: Path, rows: str) -> None:
    done = run("--seed", 0, "--rows", rows, "--out", tmp_path / "x.jsonl")
    assert done.returncode == 2 and "--rows" in done.stderr
    assert not (tmp_path / "x.jsonl").exists()
