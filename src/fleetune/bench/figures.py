"""What one measured run showed, and the summary of several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Steps at the start that no speed is taken from: kernels are made and memory is fetched in them.
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Step:
    """One optimizer step. tokens: real ones, no padding. seconds: from its start to the next one's."""

    loss: float
    tokens: int
    trained_tokens: int
    seconds: float


@dataclass(frozen=True)
class Figures:
    """One run of one program. first_step_s: from the command to the end of its first step. peak_memory_bytes: of its whole
    process tree. settings: what was asked of it, in words. Where the program tells them, of the rank with most:
    rank_memory_bytes without mapped files, rank_memory_before_bytes of it before anything was loaded; bytes_sent_per_step.
    """

    program: str
    settings: str
    steps: tuple[Step, ...]
    first_step_s: float
    peak_memory_bytes: int
    rank_memory_bytes: int = 0
    rank_memory_before_bytes: int = 0
    bytes_sent_per_step: int = 0

    @property
    def tokens_per_s(self) -> float:
        steps = self.steps[WARMUP_STEPS:]
        return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)

    @property
    def trained_tokens_per_s(self) -> float:
        steps = self.steps[WARMUP_STEPS:]
        return sum(step.trained_tokens for step in steps) / sum(step.seconds for step in steps)

    def to_json(self) -> dict[str, Any]:
        speed = {"tokens_per_s": self.tokens_per_s, "trained_tokens_per_s": self.trained_tokens_per_s}
        return {**asdict(self), "losses": [step.loss for step in self.steps], **speed}


@dataclass(frozen=True)
class Spread:
    """median of several runs, with the smallest and the largest."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def text(self, unit: float = 1.0, digits: int = 0) -> str:
        low, middle, high = (f"{value / unit:.{digits}f}" for value in (self.least, self.median, self.most))
        return f"{middle} ({low} to {high})"
