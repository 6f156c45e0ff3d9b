"""How the sequences of one step are divided: pure arithmetic that planning, the loader and the engines agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fleetune.spec.errors import UserError

DEFAULT_GLOBAL_BATCH_SIZE = 8
#: Where nobody gives a micro-batch size: as many sequences as this many tokens hold.
MICRO_BATCH_TOKENS = 1024


@dataclass(frozen=True)
class Batches:
    """A resolved step: `global_batch_size` sequences in `num_micro_batches`, numbered without knowing the world size.

    shares: micro-batches of each data rank, contiguous and in rank order; they may differ by one.
    """

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    shares: tuple[int, ...]

    @property
    def gradient_accumulation_steps(self) -> int:
        return max(self.shares)

    def range_of(self, data_rank: int) -> range:
        """Numbers of the micro-batches of one data rank within a step."""
        start = sum(self.shares[:data_rank])
        return range(start, start + self.shares[data_rank])


def shares(num_micro_batches: int, data_ranks: int) -> tuple[int, ...]:
    """Contiguous shares as even as can be, the larger ones first: 4 on 3 ranks are (2, 1, 1)."""
    each, more = divmod(num_micro_batches, data_ranks)
    return tuple(each + (rank < more) for rank in range(data_ranks))


def divide(global_batch_size: int, micro_batch_size: int, data_ranks: int) -> Batches:
    """The batches of a step for any world, also one that does not divide (a resumed run on another number of ranks)."""
    num_micro_batches = -(-global_batch_size // micro_batch_size)
    return Batches(global_batch_size, micro_batch_size, num_micro_batches, shares(num_micro_batches, data_ranks))


def sequences_of_run(num_sequences: int, epochs: float) -> int:
    """Sequences that `epochs` read: a part of an epoch is rounded up to a whole sequence."""
    return max(1, math.ceil(epochs * num_sequences - 1e-9))


def num_steps(num_sequences: int, epochs: float, global_batch_size: int) -> int:
    """Optimizer steps that read each sequence `epochs` times; sequences run on across epochs, so only the last may be short."""
    return -(-sequences_of_run(num_sequences, epochs) // global_batch_size)


def derive(
    *,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    gradient_accumulation_steps: int | None,
    data_ranks: int,
    sequence_length: int,
    any_world: bool = False,
) -> Batches:
    """From what a person gave (None: not given) the batches of a step. Raises UserError where it does not divide.

    Two of the three numbers give the third; with one of them the global batch is 8 sequences unless it is the given one.
    any_world: a micro-batch size that nobody gave must not depend on the number of data ranks; there are 8 of them, or more.
    """
    accumulation = gradient_accumulation_steps
    if global_batch_size and micro_batch_size and accumulation:
        if global_batch_size != micro_batch_size * accumulation * data_ranks:
            raise UserError(
                f"global_batch_size {global_batch_size} is not micro_batch_size {micro_batch_size} × "
                f"gradient_accumulation_steps {accumulation} × {data_ranks} data ranks = "
                f"{micro_batch_size * accumulation * data_ranks}: leave one of the three out, or give "
                f"--global-batch-size {micro_batch_size * accumulation * data_ranks}"
            )
    elif micro_batch_size and accumulation:
        global_batch_size = micro_batch_size * accumulation * data_ranks
    given = "" if global_batch_size else " (the default)"
    global_batch_size = global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    if accumulation and not micro_batch_size:
        if global_batch_size % (accumulation * data_ranks):
            raise UserError(
                f"global_batch_size {global_batch_size}{given} does not divide by gradient_accumulation_steps {accumulation} "
                f"× {data_ranks} data ranks = {accumulation * data_ranks}: give --global-batch-size as a multiple of it"
            )
        micro_batch_size = global_batch_size // (accumulation * data_ranks)
    if micro_batch_size:
        if global_batch_size % micro_batch_size:
            raise UserError(
                f"micro_batch_size {micro_batch_size} does not divide global_batch_size {global_batch_size}{given}: give "
                f"--micro-batch-size as a divisor of it, or --global-batch-size {micro_batch_size * data_ranks}"
            )
    else:
        sharers = max(8, data_ranks) if any_world else data_ranks
        limit = max(1, min(MICRO_BATCH_TOKENS // sequence_length, -(-global_batch_size // sharers)))
        micro_batch_size = max(size for size in range(1, limit + 1) if global_batch_size % size == 0)
    return divide(global_batch_size, micro_batch_size, data_ranks)
