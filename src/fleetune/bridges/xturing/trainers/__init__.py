"""xTuring's trainers. The Lightning module is imported when it is asked for: it needs the extra lightning."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "TuringLightningModule":
        from fleetune.bridges.xturing.trainers.lightning_trainer import TuringLightningModule

        return TuringLightningModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
