"""Reading rows of a file that another process appends to, each row once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class RowFollower:
    """Gives the rows that were appended since the last call. from_start False: only rows written from now on."""

    def __init__(self, path: Path, *, from_start: bool) -> None:
        self._path = path
        self._position = 0 if from_start else _size(path)

    def new_rows(self) -> list[dict[str, Any]]:
        """Whole rows only: half a line is left for the next call, a damaged one is left out."""
        size = _size(self._path)
        if size < self._position:
            self._position = 0  # another file took its place
        if size == self._position:
            return []
        with open(self._path, "rb") as file:
            file.seek(self._position)
            data = file.read(size - self._position)
        end = data.rfind(b"\n") + 1
        self._position += end
        rows = []
        for line in data[:end].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
