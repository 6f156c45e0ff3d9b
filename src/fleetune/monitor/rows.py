"""An append-only file of JSON rows that survives a killed process and a full disk.

A row goes to the system in one write as soon as it is made, so a killed process loses none. A row that the disk refuses is
kept and tried again, so a disk that was full for a while loses none either.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetune.spec.records import FORMAT_VERSION

_log = logging.getLogger(__name__)

#: Rows kept in memory while the disk takes none; about 100 MB of ledger rows.
MAX_WAITING = 100_000


class RowFile:
    """Appends rows to one file; for one process at a time. It never raises OSError: training goes on, and is told so.

    One thread may `sync` while another appends: waiting for the disk holds up nobody else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._torn = False
        self._warned = False
        self._lock = threading.Lock()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row (with the format version), after those that still wait."""
        line = json.dumps({"version": FORMAT_VERSION, **row}, ensure_ascii=False, allow_nan=False, default=str) + "\n"
        with self._lock:
            self._waiting.append(line.encode("utf-8", errors="replace"))
            self._write_waiting()

    def sync(self) -> bool:
        """Bring everything appended to the disk; False where it could not be (it is tried again with the next row)."""
        with self._lock:
            self._write_waiting()
            descriptor = self._descriptor
            if descriptor is None or self._waiting:
                return not self._waiting
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def close(self) -> None:
        self.sync()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_waiting(self) -> None:
        try:
            if self._descriptor is None:
                self._open()
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._warn(error)
        else:
            self._warned = False

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        self._descriptor = os.open(self.path, flags, 0o600)
        size = os.fstat(self._descriptor).st_size
        # A crash may have torn the last row: the next one must not be glued to it.
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def _write(self, line: bytes) -> None:
        assert self._descriptor is not None
        data = b"\n" + line if self._torn else line
        written = os.write(self._descriptor, data)
        if written < len(data):  # a disk that fills up in mid-row takes a part: the rest would make no sense alone
            self._torn = True
            raise OSError(28, f"only {written} of {len(data)} bytes of a row were written", str(self.path))
        self._torn = False

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s takes no rows (%s): they are kept in memory and tried again", self.path, error)


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with every non-finite number as null, and a `note` that says which they were: JSON has no NaN."""
    strange = {key: value for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    if not strange:
        return dict(row)
    note = ", ".join(f"{key} was {value}" for key, value in strange.items())
    return {**row, **dict.fromkeys(strange), "note": f"{row['note']}; {note}" if row.get("note") else note}
