"""What the ranks of a hanging run were doing: their stacks, asked for from outside and read in their logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

#: A rank that waits for the others has this on top of a stack: the collectives of torch, under every engine. (The elastic
#: agent, from which workers are forked, is at the bottom of every stack.)
_WAITING = re.compile(r"/torch/distributed/(?!elastic/)|/deepspeed/comm/")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")
#: So many calls from the top of a stack are looked at.
_TOP = 4


def waits_for_others(text: str) -> bool:
    """Whether a process whose stacks these are (as faulthandler writes them, the latest call first) is in a collective."""
    depth = _TOP
    for line in text.splitlines():
        if _THREAD.match(line):
            depth = 0
        elif line.startswith("  File ") and depth < _TOP:
            depth += 1
            if _WAITING.search(line):
                return True
    return False


def sizes_of(logs: Mapping[int, Path]) -> dict[int, int]:
    """Bytes of each rank's log; 0 where there is none."""
    return {rank: path.stat().st_size if path.exists() else 0 for rank, path in logs.items()}


def waiting_ranks(logs: Mapping[int, Path], before: Mapping[int, int], ranks: Iterable[int]) -> set[int]:
    """Of these ranks, those whose stacks, written behind the given sizes of their logs, stand in a collective."""
    found = set()
    for rank in ranks:
        try:
            with open(logs[rank], "rb") as file:
                file.seek(before.get(rank, 0))
                text = file.read(1 << 20).decode("utf-8", errors="replace")
        except OSError:
            continue
        if waits_for_others(text):
            found.add(rank)
    return found
