"""The two-step install of the article: both files are read by pip itself, and name this project and its extras."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.claim(
    "H10",
    command="pip install -r requirements.txt; pip install -r reqs_optional/requirements_optional_training.txt",
    seen="pip reads both files as this project and its extra all, under pinned versions",
)
@pytest.mark.parametrize(
    ("name", "wanted"), [("requirements.txt", "."), ("reqs_optional/requirements_optional_training.txt", ".[all]")]
)
def test_pip_reads_the_file_as_this_project_under_its_constraints(name, wanted, monkeypatch):
    files = pytest.importorskip("pip._internal.req.req_file", reason="pip is not installed here")
    from pip._internal.network.session import PipSession

    monkeypatch.chdir(ROOT)
    found = list(files.parse_requirements(name, session=PipSession()))
    assert [entry.requirement for entry in found if not entry.constraint] == [wanted]
    assert len([entry for entry in found if entry.constraint]) > 20
    if sys.version_info >= (3, 11):
        import tomllib

        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert "all" in extras
