"""docs/claims.md says what the tests say, for every claim of the two articles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from claims.table import IDS, TESTS, _of_mark, claims, page, shown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "claims.md"


def test_the_page_is_what_the_tests_say_now():
    assert PAGE.read_text(encoding="utf-8") == page(), "stale: make docs"


def test_every_claim_has_a_row_that_names_a_test_which_is_there():
    rows = re.findall(r"^\| ([HX]\d+) \|.*\| (yes|partly) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in rows] == IDS and len(rows) == 93
    for name in re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE.read_text(encoding="utf-8")):
        assert f"def {name[1]}(" in (TESTS / name[0]).read_text(encoding="utf-8"), name


def test_a_row_that_lacks_something_says_partly_and_what():
    text = PAGE.read_text(encoding="utf-8")
    for name, claim in claims().items():
        (row,) = re.findall(rf"^\| {name} \|.*$", text, re.MULTILINE)
        assert row.endswith("| partly |") == ("missing" in claim)
        assert ("Missing: " in row) == ("missing" in claim)


def test_a_mark_without_words_or_of_no_claim_is_an_error():
    assert len(shown()) >= 93
    for text in ('mark("H99", command="a", seen="b")', 'mark("H1", command="a")', 'mark("H1", command="", seen="b")'):
        call = ast.parse(text).body[0].value
        with pytest.raises(ValueError, match="a claim is an id"):
            _of_mark(call, "test_x")
