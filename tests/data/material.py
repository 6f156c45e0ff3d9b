"""Rows and their preparation, as the tests of this room write them down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetune.data.request import PreparedData
from fleetune.data.store import TokenStore

#: prepare(*files, tokenizer=..., progress=..., **fields of the request): the fixture of `conftest.py`.
Prepare = Callable[..., PreparedData]


def rows(number: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {"question": f"what is {index} + {index}?", "answer": f"it is {2 * index}"} for index in range(start, start + number)
    ]


def write(path: Path, content: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in content))
    return path


def samples(store: Path | None) -> list[str]:
    assert store is not None
    opened = TokenStore.open(store)
    return sorted(opened.sample_ids(range(opened.num_sequences)))


def left_behind(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "data").iterdir() if path.name.endswith(".part")]
