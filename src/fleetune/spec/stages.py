"""How the blocks of a model are divided over the stages of a pipeline: pure arithmetic that planning and ranks agree on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fleetune.spec.errors import UserError

#: Runs of blocks on each rank, by schedule. Two runs halve the time that ranks wait for each other at both ends of a step,
#: and double what they send.
RUNS_PER_RANK = {"1f1b": 1, "interleaved": 2}


@dataclass(frozen=True)
class Stage:
    """Which runs of a model's blocks lie on one rank. num_runs: of all ranks; own: numbers of this rank's, in order."""

    num_runs: int
    own: tuple[int, ...]

    @staticmethod
    def of_rank(rank: int, num_ranks: int, schedule: str) -> Stage:
        """The stage of one rank of a pipeline: run r lies on rank r modulo the number of ranks."""
        count = RUNS_PER_RANK[schedule]
        return Stage(num_ranks * count, tuple(rank + num_ranks * number for number in range(count)))

    @property
    def is_first(self) -> bool:
        """Whether the embedding is used here."""
        return self.own[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether the head is used here."""
        return self.own[-1] == self.num_runs - 1


def runs_of_blocks(num_blocks: int, num_runs: int) -> tuple[range, ...]:
    """Consecutive runs as even as can be; the longer ones first, since the last also has the head and the loss.

    Raises UserError where there are fewer blocks than runs.
    """
    if num_blocks < num_runs:
        raise UserError(
            f"the model has {num_blocks} blocks, and they cannot be divided into {num_runs} runs: give a smaller --pipeline"
        )
    each, more = divmod(num_blocks, num_runs)
    bounds = [number * each + min(number, more) for number in range(num_runs + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))
