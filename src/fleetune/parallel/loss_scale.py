"""Dynamic loss scaling for fp16, whose gradients vanish below 6e-8 and overflow above 65,504.

The rule of Micikevicius et al. 2018 (arXiv 1710.03740, section 3.2): multiply the loss, divide the gradients; where they are
not finite, leave the update out and halve the scale; after many good steps, double it.
"""

from __future__ import annotations

from typing import final

import torch

_START, _LOWEST, _HIGHEST = 2.0**16, 2.0**-14, 2.0**24
_GROWTH_STEPS = 2000


@final
class LossScale:
    """The scale and the number of good steps since it changed; always 1 where it is not enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = _START if enabled else 1.0
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """After each step: whether its gradients were finite."""
        if not self.enabled:
            return
        if not finite:
            self.value, self._good_steps = max(_LOWEST, self.value / 2), 0
            return
        self._good_steps += 1
        if self._good_steps >= _GROWTH_STEPS:
            self.value, self._good_steps = min(_HIGHEST, self.value * 2), 0

    def state(self) -> torch.Tensor:
        """float64 [2], for the checkpoint."""
        return torch.tensor([self.value, float(self._good_steps)], dtype=torch.float64)

    def restore(self, state: torch.Tensor) -> None:
        self.value, self._good_steps = float(state[0]), int(state[1])
