"""Lines for a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress


def say(line: str) -> None:
    """One line of talk, on standard error: standard output is for data."""
    with suppress(OSError, ValueError):  # a closed terminal ends no run
        print(line, file=sys.stderr, flush=True)


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """`what   value` lines with the values one below the other."""
    width = max((len(what) for what, _ in rows), default=0) + 3
    return [what.ljust(width) + value for what, value in rows]
