"""How busy a machine is while it trains: processor, memory, network, GPUs. One row every few seconds."""

from __future__ import annotations

import socket
import time
from typing import Any, final

from fleetune.launch.facts import gpus

EVERY_S = 5.0


@final
class Load:
    """Of this machine. node: its number in the run."""

    def __init__(self, node: int = 0) -> None:
        self._node = node
        self._next = 0.0
        self._sent: tuple[float, int, int] | None = None

    def row(self) -> dict[str, Any] | None:
        """What it is now, where it is time for one, else None. Bytes, percent of all cores, seconds since 1970."""
        import psutil

        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + EVERY_S
        memory = psutil.virtual_memory()
        row: dict[str, Any] = {
            "node": self._node,
            "host": socket.gethostname(),
            "time": round(time.time(), 3),
            "cpu_percent": psutil.cpu_percent(),
            "memory_used_bytes": memory.total - memory.available,
            "memory_bytes": memory.total,
            "gpus": gpus(),
        }
        counters = psutil.net_io_counters()
        if counters is not None:
            if self._sent is not None:
                seconds = now - self._sent[0]
                row["sent_bytes_per_s"] = round((counters.bytes_sent - self._sent[1]) / seconds)
                row["received_bytes_per_s"] = round((counters.bytes_recv - self._sent[2]) / seconds)
            self._sent = (now, counters.bytes_sent, counters.bytes_recv)
        return row
