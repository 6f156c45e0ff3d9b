"""A field that nothing reads is a promise that nobody keeps."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fleetune.spec.run_spec import fields

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fleetune"


def attributes_read() -> set[str]:
    """Names that the rooms above the spec read as attributes."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] != "spec":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {
                node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            }
    return found


@pytest.mark.parametrize("name", sorted(fields()))
def test_every_field_of_the_spec_is_read(name: str):
    assert name in attributes_read(), f"nothing outside the spec reads {name}"
