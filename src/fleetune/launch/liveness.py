"""Which rank hangs: judged from outside the training processes, by the supervisor's own clock alone.

A rank is silent when its signs of life stay away (it is stopped, or a call holds Python's lock), and stuck when they come but
tell of no progress. What a rank says of times is never used: clocks may differ, and jump.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

#: Phase -> seconds that it may go on without any progress once training is under way. `step` is judged by the usual step.
#: `begin`: it was started, and nothing was heard of it yet.
PHASES = {
    "begin": 600.0,
    "start": 600.0,
    "load": 600.0,
    "step": 0.0,
    "data": 120.0,
    "evaluate": 300.0,
    "save": 600.0,
    "finish": 1800.0,
}

#: Where the bound on silence is this instead: imports, a compiler and the writing of files hold Python's lock for long.
QUIET_S = 60.0
_QUIET_PHASES = ("start", "load", "save", "finish")

#: A step may take so many times as long as all but one in a hundred of the steps before.
SLOW_STEPS = 6.0
_PERCENTILE = 0.99
_MAX_REMEMBERED = 1000

#: Longest time between two looks that counts: where the supervisor itself was stopped, nobody else is to blame.
_MAX_GAP_S = 1.0
#: In doubt which rank the others wait for, it is one that has been silent for so long.
_SUSPICIOUS_S = 2.0

#: Stands for the agent among the ranks.
AGENT = -1


@dataclass(frozen=True)
class Hang:
    """A rank (or the agent) that hangs. silent: without a sign of life; else without progress. usual_s: of a step, if known."""

    rank: int
    phase: str
    step: int
    silent: bool
    seconds: float
    usual_s: float | None

    def cause(self) -> str:
        """One line for a person."""
        where = f"in step {self.step}" if self.phase == "step" else f"in phase {self.phase}, after step {self.step}"
        if self.rank == AGENT:
            return f"the agent that starts the workers gave no sign of life for {self.seconds:.1f} s: it is stopped, or hangs"
        if self.silent:
            return f"hangs: no sign of life for {self.seconds:.1f} s {where}: it is stopped, or a call holds Python's lock"
        usual = f" (a step usually takes {self.usual_s:.2g} s)" if self.usual_s is not None and self.phase == "step" else ""
        return f"hangs: no progress for {self.seconds:.1f} s {where}{usual}"


@dataclass
class _Rank:
    """What is known of one rank. Times are by the judge's own clock. working: seconds in the step that is not done yet."""

    phase: str
    step: int
    marks: int
    done: int
    sign_at: float
    mark_at: float
    working: float = 0.0
    is_over: bool = False


@final
@dataclass
class Liveness:
    """The judge of one attempt.

    hang_s: the bound on silence and on a step, in seconds; 0 never finds a hang. usual_s: seconds that all but one in a hundred
    of the last steps stay under; None before the first.
    """

    hang_s: float
    usual_s: float | None = None
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_REMEMBERED))
    _clock: float = 0.0
    _looked_at: float | None = None

    def pass_time(self, now: float) -> None:
        """Let the judge's clock run on to `now` (seconds of a monotonic clock). Call it before `saw`, ten times a second."""
        if self._looked_at is not None:
            self._clock += min(max(0.0, now - self._looked_at), _MAX_GAP_S)
        self._looked_at = now

    def expect(self, rank: int, phase: str = "begin") -> None:
        """This rank (or the agent) runs: signs of life are due from now on, also where its first one never comes."""
        self._ranks.setdefault(rank, _Rank(phase, 0, 0, 0, self._clock, self._clock))

    def saw(self, rank: int, phase: str, step: int, *, marks: int = 0, done: int = 0) -> None:
        """A sign of life has come. marks: grows with all progress. done: steps that this process has made."""
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(phase, step, marks, done, self._clock, self._clock)
            return
        if known.phase in ("step", "data"):
            known.working += self._clock - known.sign_at
        if done > known.done:
            self._steps.append(known.working / (done - known.done))
            known.working = 0.0
            ordered = sorted(self._steps)
            self.usual_s = ordered[math.ceil(_PERCENTILE * len(ordered)) - 1]
        if marks != known.marks:
            known.mark_at = self._clock
        known.phase, known.step, known.marks, known.done, known.sign_at = phase, step, marks, done, self._clock

    def saw_end(self, ranks: Iterable[int]) -> None:
        """These have ended, or said how they end: nothing more is expected of them."""
        for rank in ranks:
            if rank in self._ranks:
                self._ranks[rank].is_over = True

    @property
    def has_stepped(self) -> bool:
        """Whether some rank has made a step in this attempt."""
        return any(rank.done for rank in self._ranks.values())

    def state(self) -> dict[int, dict[str, object]]:
        """Of each rank: `phase`, `step`, and seconds since its last sign of life, for whoever looks at the run."""
        return {
            number: {"phase": rank.phase, "step": rank.step, "silent_s": round(self._clock - rank.sign_at, 3)}
            for number, rank in self._ranks.items()
            if number != AGENT and not rank.is_over
        }

    def hung(self) -> list[Hang]:
        """The ranks that hang, those to suspect first in front; empty while all is well."""
        if not self.hang_s:
            return []
        found = [hang for number in self._ranks if (hang := self._judge(number)) is not None]
        if not found:
            return []
        silent = [
            self._hang(number, silent=True)
            for number, rank in self._ranks.items()
            if not rank.is_over and self._clock - rank.sign_at > _SUSPICIOUS_S
        ]
        if silent:
            return sorted(silent, key=lambda hang: -hang.seconds)
        return sorted(found, key=lambda hang: (self._ranks[hang.rank].marks, hang.rank))

    def _judge(self, number: int) -> Hang | None:
        rank = self._ranks[number]
        quiet, stuck = self._bounds(number, rank)
        if rank.is_over:
            return None
        if self._clock - rank.sign_at > quiet:
            return self._hang(number, silent=True)
        return self._hang(number, silent=False) if self._clock - rank.mark_at > stuck else None

    def _bounds(self, number: int, rank: _Rank) -> tuple[float, float]:
        """(seconds without a sign of life, seconds without progress) that a rank is allowed."""
        if number == AGENT:
            return max(self.hang_s, 10.0), math.inf
        if rank.phase == "begin":
            return max(self.hang_s, PHASES["begin"]), math.inf
        is_slow = not rank.done or rank.phase in _QUIET_PHASES
        quiet = max(self.hang_s, QUIET_S) if is_slow else self.hang_s
        if not rank.done and rank.phase in ("step", "data"):
            return quiet, max(self.hang_s, PHASES["start"])  # the first step compiles, allocates and connects
        if rank.phase == "step":
            return quiet, max(self.hang_s, SLOW_STEPS * (self.usual_s or 0.0))
        return quiet, max(self.hang_s, PHASES.get(rank.phase, PHASES["start"]))

    def _hang(self, number: int, *, silent: bool) -> Hang:
        rank = self._ranks[number]
        since = rank.sign_at if silent else rank.mark_at
        return Hang(number, rank.phase, rank.step, silent, self._clock - since, self.usual_s)
