"""Speed and time left, smoothed over the last steps."""

from __future__ import annotations

from collections import deque


class Throughput:
    """Fed with one step at a time; the first of them counts less, since it pays for warming up."""

    def __init__(self, window: int = 20) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._num_steps = 0

    def add(self, tokens: float, seconds: float) -> None:
        """One step: its tokens over all ranks, and its seconds with the wait for data."""
        if self._num_steps == 1:
            self._steps.clear()  # the first step stood in for all while it was alone
        self._steps.append((tokens, seconds))
        self._num_steps += 1

    def restart(self) -> None:
        """Forget what was seen: another attempt, maybe on other machines."""
        self._steps.clear()
        self._num_steps = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over the window; None before the first step."""
        seconds = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds > 0 else None

    def time_left(self, num_steps: int) -> float | None:
        """Seconds that `num_steps` more steps will take; None before the first step."""
        if not self._steps:
            return None
        return num_steps * sum(seconds for _, seconds in self._steps) / len(self._steps)
