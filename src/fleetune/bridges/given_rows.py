"""Rows and texts that a bridge has written out: files in the cache, named by their content, so that a run can go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from fleetune.data.cache import cache_folder


def write_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """The path of a .jsonl file of these rows."""
    return write_text("".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows), ".jsonl")


def write_text(text: str, suffix: str) -> str:
    """The path of a file that holds `text`."""
    data = text.encode("utf-8", "surrogatepass")
    path = cache_folder(None).parent / "given" / f"{hashlib.sha256(data).hexdigest()[:32]}{suffix}"
    path.parent.mkdir(exist_ok=True, mode=0o700)
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(data)
        os.replace(temporary, path)
    return str(path)
