from __future__ import annotations

from pathlib import Path

from fleetune.cli.main import COMMANDS
from fleetune.cli.reference import reference
from fleetune.spec.declared import declared

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_the_page_is_what_the_program_says_now():
    assert PAGE.read_text(encoding="utf-8") == reference(), "docs/reference.md is stale: run make docs"


def test_it_has_every_field_every_other_name_and_every_command():
    text = reference()
    for field in declared().values():
        assert f"`{field.flag}`" in text and field.description in text
        assert all(f"`{alias}`" in text for alias in field.aliases if alias != field.shown)
    assert all(f"### fleetune {command}" in text for command in COMMANDS if command != "data")
    assert "### fleetune data inspect" in text and "### fleetune data preview" in text
