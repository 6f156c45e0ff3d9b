from __future__ import annotations

import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetune.spec.errors import UserError
from fleetune.spec.yaml_file import dump, parse, read_document, read_yaml


def values(text):
    return parse(text, "run.yaml").values


def test_numbers_are_numbers_and_the_surprises_of_yaml_1_1_are_text():
    assert values("a: 1e-5\nb: 2e-4\nc: 3\nd: .5\ne: 010\nf: -1.5E+3") == {
        "a": 1e-5, "b": 2e-4, "c": 3, "d": 0.5, "e": 10, "f": -1500.0,
    }  # fmt: skip
    assert values("a: on\nb: no\nc: 12:30\nd: 2024-01-01\ne: 1_000\nf: 0x1f") == {
        "a": "on", "b": "no", "c": "12:30", "d": "2024-01-01", "e": "1_000", "f": "0x1f",
    }  # fmt: skip
    assert values("a: '1'\nb: \"true\"\nc: true\nd: ~\ne:") == {"a": "1", "b": "true", "c": True, "d": None, "e": None}


def test_every_duplicate_key_is_told_with_both_lines():
    with pytest.raises(UserError) as error:
        values("seed: 1\nmodel: a\nseed: 2\nmodel: b\n")
    assert error.value.problems == (
        "run.yaml: seed is given in line 1 and again in line 3: keep one of them",
        "run.yaml: model is given in line 2 and again in line 4: keep one of them",
    )


def test_a_duplicate_key_inside_a_list_is_found_too():
    with pytest.raises(UserError, match=r"x is given in line 2 and again in line 2"):
        values("a:\n  - {x: 1, x: 2}\n")


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch owned']",
        "a: !!python/name:os.system",
        "a: !include other.yaml",
        "!!python/object/new:type {}",
        "a: !!str 5",
    ],
)
def test_tags_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="tag"):
        values(text)
    assert list(tmp_path.iterdir()) == []


def test_aliases_that_multiply_are_stopped_at_once():
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    began = time.monotonic()
    with pytest.raises(UserError, match="aliases"):
        values("\n".join(levels))
    assert time.monotonic() - began < 5


def test_an_alias_of_itself_is_refused():
    with pytest.raises(UserError):
        values("a: &a [*a]")


def test_a_few_aliases_are_read():
    assert values("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}


def test_a_million_brackets_end_in_an_error_and_not_in_a_crash():
    with pytest.raises(UserError, match="nest"):
        values("a: " + "[" * 900_000)


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"# " + b"x" * (2 << 20))
    with pytest.raises(UserError, match="1,048,576"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a: [1, 2", "expected ','"),
        (b"a: 1\n b: 2", "line 2"),
        (b"- 1\n- 2", "name: value"),
        (b"just words", "name: value"),
        (b"a: 1\n---\nb: 2", "second document"),
        (b"a: \xff", "UTF-8"),
        (b"a: x\0y", "run.yaml"),
        (b"? [1, 2]\n: x", "one word"),
        (b"a: &b {x: 1}\nc:\n  <<: *b", "<<"),
        (b"a: *nowhere", "line 1"),
    ],
)
def test_what_is_no_flat_yaml_is_one_clear_error(data, says, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(data)
    with pytest.raises(UserError, match=says):
        read_yaml(path)


def test_an_empty_file_gives_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "run.yaml") == {}


def test_a_missing_file_and_a_folder_are_told(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_yaml(tmp_path / "run.yaml")
    with pytest.raises(UserError, match="folder"):
        read_yaml(tmp_path)


def test_lines_and_source_texts_are_kept(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("\ufeff# first\nmodel: a\n\nrevision: 0123\n")
    document = read_document(path)
    assert document.lines == {"model": 2, "revision": 4}
    assert document.values["revision"] == 123
    assert document.texts["revision"] == "0123"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
@given(st.dictionaries(st.text("abcdefgh_-", min_size=1, max_size=8), json_values, max_size=5))
def test_what_is_dumped_is_read_back_the_same(written):
    written.pop("<<", None)
    assert values(dump(written)) == written


@pytest.mark.parametrize(
    "text", ["1e-5", "on", "null", "", " x", "a: b", "#no", "12:30", "é", "-", "x\ny", "0x1f", "1", "=", "<<"]
)
def test_text_stays_text(text):
    assert values(dump({"model": text})) == {"model": text}


def test_infinity_is_read_back():
    assert values(dump({"a": math.inf, "b": -math.inf})) == {"a": math.inf, "b": -math.inf}
