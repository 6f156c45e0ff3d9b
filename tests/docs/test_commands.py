"""Every command block of the README and of docs/ is run, page by page, as a reader would type it.

The ```bash blocks of a page run one after the other in one new folder, so a block may use what the one before it made. Three
things differ from what a reader does: `smollm2-135m` is a tiny random model, `make X` is `make -n X` (the target must exist;
what it does is tested elsewhere), and activating the environment does nothing, since the tests already run in one.

What a page needs besides is said in a comment before a block, `<!-- test: ITEM; ITEM -->`, where an item is

    rows FILE       rows of a chat that can be trained on lie in FILE
    pairs FILE      a csv with the columns customer and support lies in FILE
    file FILE       the next ```yaml block of the page lies in FILE
    --FLAG ...      added to each `fleetune train` of this block: a page trains for hours, a test for a few steps
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- test: ([^>]*) -->\s*$")
PROMPTS = ("Set the lamp to seventy percent", "Turn the kitchen lamp off", "How many clips did she sell?")


@dataclass
class Block:
    """One bash block: its text, the flags for its trainings, and the files (name -> content) it needs."""

    text: str
    flags: str = ""
    files: dict[str, str] = field(default_factory=dict)


def blocks_of(page: str) -> list[Block]:
    """The bash blocks of a page in order. Raises AssertionError for an item that means nothing."""
    fences = list(_FENCE.finditer(page))
    found = []
    for index, fence in enumerate(fences):
        if fence[1] != "bash":
            continue
        block = Block(fence[2])
        comment = _COMMENT.search(page[fences[index - 1].end() if index else 0 : fence.start()])
        for item in comment[1].split(";") if comment else ():
            kind, _, name = item.strip().partition(" ")
            if kind.startswith("--"):
                block.flags = item.strip()
            elif kind == "file":
                block.files[name] = next(later[2] for later in fences[index:] if later[1] == "yaml")
            else:
                block.files[name] = {"rows": chat_rows, "pairs": csv_pairs}[kind]()
        found.append(block)
    return found


def chat_rows() -> str:
    rows = []
    for number in range(30):
        said = {"user": f"{PROMPTS[number % 3]} ({number})", "assistant": f"done {number}"}
        turns = [{"role": role, "content": content} for role, content in said.items()]
        rows.append(json.dumps({"messages": turns}) + "\n")
    return "".join(rows)


def csv_pairs() -> str:
    return "customer,support\n" + "".join(f"Where is parcel {number}?,On its way to you.\n" for number in range(12))


def script_of(block: Block, model: Path) -> str:
    """The block as a shell script, each command on one line."""
    lines = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("fleetune train") and block.flags:
            line = f"{line} {block.flags}"
        lines.append(": the tests run in it" if line == ". .venv/bin/activate" else line)
    return "\n".join(lines).replace("smollm2-135m", str(model)) + "\n"


@pytest.fixture
def reader(tmp_path: Path) -> dict[str, str]:
    """The environment of a reader whose working folder is a checkout: `fleetune`, `python` and `make` are found."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    commands = tmp_path / ".commands"
    commands.mkdir()
    (commands / "make").write_text(f'#!/bin/sh\nexec /usr/bin/env -i PATH=/usr/bin:/bin make -n -C {REPOSITORY} "$@"\n')
    (commands / "make").chmod(0o755)
    return {**os.environ, "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])}


#: The page that a newcomer reads; the others run with the long tests.
FIRST = ("README.md",)


@pytest.mark.claim(
    "H43",
    command="docs/",
    seen="every command of the guides is run as a reader types it",
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in FIRST else pytest.mark.long) for page in PAGES],
    ids=[str(page.relative_to(REPOSITORY)) for page in PAGES],
)
def test_every_command_block_of_a_page_runs(page: Path, tmp_path: Path, reader: dict[str, str], tiny_llama: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        for name, content in block.files.items():
            (tmp_path / name).write_text(content.replace("smollm2-135m", str(tiny_llama)), encoding="utf-8")
        script = script_of(block, tiny_llama)
        done = subprocess.run(
            ["sh", "-euxc", script], stdin=subprocess.DEVNULL, cwd=tmp_path, env=reader, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{page.name}:\n{script}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_block_is_found_with_its_flags_and_files() -> None:
    page = "text\n<!-- test: file run.yaml; --max-steps 2 -->\n```bash\nfleetune train run.yaml\n```\n"
    page += "\n```yaml\nmodel: smollm2-135m\n```\n"
    (block,) = blocks_of(page)
    assert block.files == {"run.yaml": "model: smollm2-135m\n"}
    assert script_of(block, Path("/m")) == "fleetune train run.yaml --max-steps 2\n"


def test_an_item_that_means_nothing_is_a_fault_of_the_page() -> None:
    with pytest.raises(KeyError):
        blocks_of("<!-- test: row my.jsonl -->\n```bash\ntrue\n```\n")
