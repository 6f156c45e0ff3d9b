"""Dynamic loss scaling for fp16, whose gradients vanish below 6e-8 and overflow above 65,504.

The rule of Micikevicius et al. 2018 (arXiv 1710.03740, section 3.2): multiply the loss, divide the gradients; where they are
not finite, leave the update out and halve the scale; after many good steps, double it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch

from fleetune.spec.records import Shard, ShardReader

_NAME, _ROLE = "loss_scale", "engine"
_HIGHEST = 2.0**24


@dataclass(frozen=True)
class Scaling:
    """How the scale moves. start: the first one. lowest: it goes no lower. growth_steps: it doubles after so many good steps.
    is_fixed: it stays at the start."""

    start: float = 2.0**16
    lowest: float = 2.0**-14
    growth_steps: int = 2000
    is_fixed: bool = False


@dataclass(frozen=True)
class Verdict:
    """What becomes of a step. norm: of the gradient, without the scale. applied: whether it is an update; then gradients are
    multiplied by `factor`, which takes the scale out and clips. overflow: see `StepReport`."""

    norm: float
    applied: bool
    overflow: bool
    factor: float


@final
class LossScale:
    """The scale and the number of good steps since it changed; always 1 where it is not enabled."""

    def __init__(self, *, enabled: bool, scaling: Scaling | None = None) -> None:
        self._scaling = scaling or Scaling()
        self.enabled = enabled
        self.value = self._scaling.start if enabled else 1.0
        self._good_steps = 0

    def judge(self, loss: float, scaled_norm: float, *, clip: float) -> Verdict:
        """Decide on a step by its loss and the norm of its scaled gradients, and let the scale move. clip: 0 never does.

        All ranks give the same numbers, and so come to the same verdict without asking each other.
        """
        norm = scaled_norm / self.value
        applied = math.isfinite(loss) and math.isfinite(norm)
        shrink = clip / norm if 0 < clip < norm else 1.0
        verdict = Verdict(norm, applied, self.enabled and math.isfinite(loss) and not applied, shrink / self.value)
        self.update(math.isfinite(norm))
        return verdict

    def update(self, finite: bool) -> None:
        """After each step: whether its gradients were finite."""
        if not self.enabled or self._scaling.is_fixed:
            return
        if not finite:
            self.value, self._good_steps = max(self._scaling.lowest, self.value / 2), 0
            return
        self._good_steps += 1
        if self._good_steps >= self._scaling.growth_steps:
            self.value, self._good_steps = min(_HIGHEST, self.value * 2), 0

    def shards(self) -> Iterator[Shard]:
        """What a checkpoint keeps of it, float64 [2]; nothing where it is off. One rank writes it."""
        if self.enabled:
            state = torch.tensor([self.value, float(self._good_steps)], dtype=torch.float64)
            yield Shard(_NAME, _ROLE, (2,), (0,), state)

    def load(self, read: ShardReader) -> None:
        """Go on from a checkpoint of any engine. Raises KeyError where it is on and the checkpoint has none."""
        if not self.enabled:
            return
        state = read(_NAME, _ROLE, (0,), (2,))
        if not self._scaling.is_fixed:
            self.value, self._good_steps = float(state[0]), int(state[1])
