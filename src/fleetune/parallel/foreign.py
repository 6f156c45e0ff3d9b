"""Ranks that somebody else's launcher has started (`torchrun`): how they talk before they have a group.

They meet at the launcher's own store (`env://`). What one says, others hear; messages are JSON. A restart of the launcher
begins with new words, and remembers what was written down with `remember`.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from fleetune.parallel.world import Place

#: Preparing a large model and its rows may take long; who waits for it waits so long at most.
_PATIENCE = timedelta(hours=6)


@final
class Meeting:
    """This process among the ranks of a foreign launcher. restart: how often the launcher has started them again."""

    def __init__(self) -> None:
        self.place = Place.from_environment()
        self.restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        store.set_timeout(_PATIENCE)
        self._lasting = dist.PrefixStore("fleetune", store)
        self._store = dist.PrefixStore(f"fleetune/{self.restart}", store)

    def say(self, name: str, value: Any) -> None:
        """Let all ranks of this start hear `value` under `name`. Say a name once."""
        self._store.set(name, json.dumps(value))

    def hear(self, name: str) -> Any:
        """What was said under `name`; waits for it."""
        return json.loads(self._store.get(name))

    def remember(self, name: str, value: str) -> None:
        """Keep `value` for the launcher's later restarts."""
        self._lasting.set(name, value)

    def recall(self, name: str) -> str | None:
        """What an earlier start of this launcher has kept."""
        return self._lasting.get(name).decode() if self._lasting.check([name]) else None
