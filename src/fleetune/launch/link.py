"""The line between the driver and a node: one JSON object a line in both directions, with a beat every second.

It runs over the standard input and output of the node's process, whoever started that (this machine, ssh). Nobody but the two
can speak on it, it needs no port, and its end is the end of the other side. Where a cable is pulled nothing ends: then the
missing beats tell, by this side's own monotonic clock.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, final

#: A beat is sent so often, in seconds.
BEAT_S = 1.0
#: Nothing heard for so long, in seconds: the other side is lost. The beats are a thread's own, whatever the process does, and
#: time in which this side itself did not run (a crowded or suspended machine) is not counted.
SILENCE_S = 9.0
#: Longest line, in bytes; longer ones are a fault of the other side, and end the link.
MAX_LINE_BYTES = 32 << 20
#: What waits to be sent while the other side does not read, in bytes; then the link is given up.
_MAX_WAITING_BYTES = 256 << 20


@final
class Link:
    """One side. A thread of its own reads, writes and beats, so that a busy process is not taken for a lost one.

    is_strict False: lines that are no JSON objects are kept in `noise` until the first one that is (a login shell may print).
    """

    def __init__(self, read_end: int, write_end: int, *, is_strict: bool = True) -> None:
        self.noise: deque[str] = deque(maxlen=20)
        self.why_ended: str | None = None
        self.has_spoken = False
        self._read_end, self._write_end = read_end, write_end
        self._is_strict = is_strict
        self._rows: deque[dict[str, Any]] = deque()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._pending = b""
        self._silent_s = 0.0
        self._lock = threading.Lock()
        self._bell, self._ringer = os.pipe()
        self._closing = False
        for end in (read_end, write_end, self._bell, self._ringer):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the other side is gone, or has not been heard of for too long."""
        return self.why_ended is not None or (self.has_spoken and self.silent_s > SILENCE_S)

    @property
    def silent_s(self) -> float:
        """Seconds of this side's own time since anything was heard."""
        return self._silent_s

    def send(self, row: Mapping[str, Any]) -> None:
        """Send one object, soon. Never waits; what is sent to a lost side is lost."""
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", errors="surrogatepass") + b"\n"
        with self._lock:
            self._waiting.append(line)
            self._waiting_bytes += len(line)
        with suppress(BlockingIOError, OSError):
            os.write(self._ringer, b"!")

    def take(self) -> list[dict[str, Any]]:
        """What has come since the last time, without beats. Never waits."""
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        return rows

    def close(self, *, seconds: float = 1.0) -> None:
        """Send what waits, at most so long, and let go. The other side sees the end of the line."""
        self._closing = True
        with suppress(OSError):
            os.write(self._ringer, b"!")
        self._thread.join(seconds)
        self._end("closed")
        if not self._thread.is_alive():
            for end in (self._bell, self._ringer):
                with suppress(OSError):
                    os.close(end)

    def _run(self) -> None:
        next_beat = before = time.monotonic()
        while self.why_ended is None:
            now = time.monotonic()
            self._silent_s += min(now - before, 2 * BEAT_S)
            before = now
            if now >= next_beat:
                self.send({"beat": round(now, 1)})
                next_beat = now + BEAT_S
            writers = [self._write_end] if self._waiting else []
            if self._closing and not writers:
                return
            try:
                readable, writable, _ = select.select([self._read_end, self._bell], writers, [], max(0.0, next_beat - now))
                if self._bell in readable:
                    os.read(self._bell, 4096)
                if self._read_end in readable:
                    self._read()
                if writable:
                    self._write()
            except BlockingIOError:
                continue
            except OSError as error:
                self._end(f"the line broke: {error.strerror}")
            except ValueError as error:
                self._end(f"the line broke: {error}")

    def _read(self) -> None:
        piece = os.read(self._read_end, 1 << 18)
        if not piece:
            self._end("the other side ended")
            return
        self._silent_s, self.has_spoken = 0.0, True
        *lines, self._pending = (self._pending + piece).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            self._end(f"a line of more than {MAX_LINE_BYTES} bytes came")
            return
        for line in lines:
            self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            self.noise.append(line[:500].decode("utf-8", errors="replace"))
            if self._is_strict:
                self._end("a line came that is no JSON object")
            return
        self._is_strict = True
        if "beat" not in row:
            self._rows.append(row)

    def _write(self) -> None:
        with self._lock:
            if self._waiting_bytes > _MAX_WAITING_BYTES:
                raise ValueError("the other side does not read")
            line = self._waiting[0]
            written = os.write(self._write_end, line[: 1 << 16])
            self._waiting_bytes -= written
            if written == len(line):
                self._waiting.popleft()
            else:
                self._waiting[0] = line[written:]

    def _end(self, why: str) -> None:
        if self.why_ended is None:
            self.why_ended = why
