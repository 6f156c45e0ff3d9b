"""What a node's processes write is sent on to node 0's run folder: logs as they grow, small files when they change."""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from fleetune.launch.link import Link
from fleetune.launch.processes import open_log
from fleetune.spec.run_folder import RunFolder

_EVERY_S = 0.5
#: Of one file at one time; the rest follows.
_PIECE_BYTES = 1 << 20
#: A file in these rooms is sent whole; they are small.
_WHOLE = ("outcomes", "heartbeat")
_MAX_WHOLE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


@final
class Forwarder:
    """The node's side. It never sends what lay in the folder before it was made."""

    def __init__(self, folder: RunFolder, link: Link) -> None:
        self._folder, self._link = folder, link
        self._positions = {path: size for path, size in _sizes(folder.logs)}
        self._marks = {path: _mark(path) for name in _WHOLE for path, _ in _sizes(folder.path / name)}
        self._next = 0.0

    def forward(self, *, now: bool = False) -> None:
        """Send what is new, at most twice a second. now: all of it, at once."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        for path, size in _sizes(self._folder.logs):
            while self._positions.get(path, -1) < size:  # an empty log is sent too: its rank has come
                self._send_piece(path)
                if not now:
                    break
        for name in _WHOLE:
            for path, size in _sizes(self._folder.path / name):
                mark = _mark(path)
                if mark != self._marks.get(path) and size <= _MAX_WHOLE_BYTES:
                    self._marks[path] = mark
                    self._send_whole(name, path)

    def _send_piece(self, path: Path) -> None:
        position = self._positions.get(path, 0)
        with open(path, "rb") as file:
            file.seek(position)
            data = file.read(_PIECE_BYTES)
        self._positions[path] = position + len(data)
        self._link.send({"file": ["logs", path.name], "append": base64.b64encode(data).decode()})

    def _send_whole(self, room: str, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError:
            return  # replaced just now: the next look sees the new one
        self._link.send({"file": [room, path.name], "whole": base64.b64encode(data).decode()})


def receive(folder: RunFolder, row: Mapping[str, Any]) -> None:
    """The driver's side: write what a node sent. Raises ValueError for a place that no node may write to."""
    room, name = row["file"]
    if room not in ("logs", *_WHOLE) or not _NAME.fullmatch(name):
        raise ValueError(f"a node sent a file {name!r} for {room!r}")
    path = folder.path / room / name
    if "append" in row:
        descriptor = open_log(path)
        try:
            os.write(descriptor, base64.b64decode(row["append"]))
        finally:
            os.close(descriptor)
        return
    draft = path.with_name(f".{name}.{os.getpid()}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(base64.b64decode(row["whole"]))
    os.replace(draft, path)


def _sizes(folder: Path) -> list[tuple[Path, int]]:
    found = []
    try:
        for entry in os.scandir(folder):
            if entry.is_file(follow_symlinks=False) and _NAME.fullmatch(entry.name):
                found.append((Path(entry.path), entry.stat(follow_symlinks=False).st_size))
    except OSError:
        return found
    return found


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
