"""docs/claims.md, made from the tests that carry a claim's id: `python tests/claims/table.py > docs/claims.md`.

A test says what it shows of a claim by `@pytest.mark.claim("H1", command="...", seen="...")`, once for each claim. The
tests are read, not run: a row stands only while its test is there, under that name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[1]
IDS = [*(f"H{number}" for number in range(1, 44)), *(f"X{number}" for number in range(1, 51))]

HEAD = """# What the two articles promise, and what stands

Made from the tests by `make docs`; a test fails when this page is stale, or a row names a test that is not there. H1 to H43 are
the claims of the article about h2oGPT, X1 to X50 of the one about xTuring. `yes`: the named test shows it; `partly`: what is
missing stands with what was seen. Tests marked long run with `make test-long`.

| id | claim | command | what was seen | test | |
|---|---|---|---|---|---|
"""
FRAME = """
## The frame of article 1

| what it says h2oGPT does | here |
|---|---|
| Mixtral | trained: `mixtral-8x7b`, one of the families of the anatomy tests |
| Ollama, llama.cpp | GGUF files are read as models; exports for both come later |
| documents as knowledge | documents as training data come later; rows of text are trained today |
| images, video | not supported: only text is trained |
"""


@dataclass(frozen=True)
class Shown:
    """What one test shows of one claim. test: `journeys/test_train.py::test_name`."""

    claim: str
    command: str
    seen: str
    test: str


def claims() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((TESTS / "claims" / "claims.yaml").read_text(encoding="utf-8"))


def shown() -> list[Shown]:
    """What every test says of itself, in the order of files and lines."""
    return [entry for path in sorted(TESTS.rglob("test_*.py")) for entry in _of_file(path)]


def _of_file(path: Path) -> Iterator[Shown]:
    text = path.read_text(encoding="utf-8")
    if "mark.claim(" not in text:
        return
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.claim":
                yield _of_mark(decorator, f"{path.relative_to(TESTS).as_posix()}::{node.name}")


def _of_mark(mark: ast.Call, test: str) -> Shown:
    """Raises ValueError for a mark that does not say an id, a command and what was seen, in plain texts."""
    (claim,) = [ast.literal_eval(argument) for argument in mark.args]
    said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords}
    if claim not in IDS or set(said) != {"command", "seen"} or not all(said.values()):
        raise ValueError(f"{test}: a claim is an id with command and seen, and this says {claim!r}, {said}")
    return Shown(claim, said["command"], said["seen"], test)


def page() -> str:
    """The whole page."""
    known, found = claims(), shown()
    if list(known) != IDS:
        raise ValueError(f"claims.yaml must hold {IDS[0]} to {IDS[-1]} in order, and lacks or misplaces some")
    return HEAD + "".join(_row(name, known[name], [entry for entry in found if entry.claim == name]) for name in IDS) + FRAME


def _row(name: str, claim: dict[str, Any], tests: list[Shown]) -> str:
    if not tests:
        raise ValueError(f"no test carries the claim {name}: mark one with @pytest.mark.claim({name!r}, command=..., seen=...)")
    seen = "; ".join(entry.seen for entry in tests)
    for word in ("note", "missing"):
        if word in claim:
            seen += f". {'Missing' if word == 'missing' else 'But'}: {claim[word]}"
    commands = "<br>".join(dict.fromkeys(f"`{entry.command}`" for entry in tests))
    names = "<br>".join(f"`{entry.test}`" for entry in tests)
    status = "partly" if "missing" in claim else "yes"
    cells = (cell.replace("|", "\\|") for cell in (claim["claim"], commands, seen, names))
    return f"| {name} | {' | '.join(cells)} | {status} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
