"""Learning-rate schedules: pure functions of the step. Nothing is stored for them, so nothing can be lost on resume."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step of a run.

    peak: the highest learning rate. num_steps: the horizon, in optimizer steps. shape: `cosine`, `linear` or `constant`.
    warmup: share of the horizon in which the rate rises linearly to the peak; warmup_steps: the same in steps, where it is
    given. final_share: the rate at the end of the
    horizon, and after it, as a share of the peak (`constant` has none).
    """

    peak: float
    num_steps: int
    shape: str = "cosine"
    warmup: float = 0.0
    warmup_steps: int | None = None
    final_share: float = 0.0

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step `step` (0-based)."""
        warmup_steps = math.ceil(self.warmup * self.num_steps) if self.warmup_steps is None else self.warmup_steps
        if step < warmup_steps:
            return self.peak * (step + 1) / (warmup_steps + 1)
        if self.shape == "constant":
            return self.peak
        progress = min(1.0, (step - warmup_steps) / max(1, self.num_steps - 1 - warmup_steps))
        if self.shape == "cosine":
            height = 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            height = 1.0 - progress
        return self.peak * (self.final_share + (1.0 - self.final_share) * height)


#: Peak learning rate where nobody gives one (design: an adapter's new weights take ten times larger steps).
DEFAULT_LEARNING_RATE = {"lora": 2e-4, "full": 2e-5}
