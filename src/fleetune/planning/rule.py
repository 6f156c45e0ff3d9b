"""A rule of what cannot be combined, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import ModelShape
from fleetune.spec.run_spec import RunSpec


@dataclass(frozen=True)
class Asked:
    """What a rule looks at. engine: its name in `planning/engines.py`. shape: None where the model was not found.

    device: `cpu` or `cuda`.
    """

    spec: RunSpec
    layout: Layout
    engine: str
    device: str
    shape: ModelShape | None = None


@dataclass(frozen=True)
class Rule:
    """what: the combination in general, for the table. collides: the values of this run that collide, in words, or None.

    why: the reason, and instead: an imperative, both as they are told and written into the table.
    """

    what: str
    collides: Callable[[Asked], str | None]
    why: str
    instead: str

    def told(self, values: str) -> str:
        """The problem, for these values that collide."""
        return f"{values}: {self.why}. {self.instead[:1].upper()}{self.instead[1:]}"

    def refusal(self, asked: Asked) -> str | None:
        """The problem as it is told, or None where the run is none of this rule's business."""
        values = self.collides(asked)
        return self.told(values) if values else None
