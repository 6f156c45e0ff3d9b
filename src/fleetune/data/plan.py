"""The sample plan: which sequences a step reads. Global, without a list, and its whole state is one integer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fleetune.data.permutation import Permutation, key_of
from fleetune.spec.batches import sequences_of_run


@dataclass(frozen=True)
class SamplePlan:
    """The sequences of every step of a run, the same for every world size.

    A run reads positions 0, 1, 2, ... of one endless row: epoch after epoch, each a permutation of the sequences that
    (seed, epoch) give. A step is `global_batch_size` positions; only the last step of a run may be short.

    num_sequences: sequences of the store. num_steps: the run ends before this step. last_position: it reads no position
    from here on. first_step, first_position: where this (perhaps resumed) run begins; `first_position` is the
    `next_sequence` of a checkpoint. order: int64 [num_sequences], the sequences of every epoch in this order instead of a
    permutation.
    """

    num_sequences: int
    seed: int
    global_batch_size: int
    num_steps: int
    last_position: int
    first_step: int = 0
    first_position: int = 0
    order: np.ndarray | None = field(default=None, compare=False)

    def positions(self, step: int) -> range:
        """The positions that `step` (0-based, not before `first_step`) reads."""
        if not self.first_step <= step < self.num_steps:
            raise IndexError(f"step {step} is not in {self.first_step}..{self.num_steps - 1}")
        start = self.first_position + (step - self.first_step) * self.global_batch_size
        return range(start, min(start + self.global_batch_size, self.last_position))

    def step(self, step: int) -> np.ndarray:
        """Sequence numbers of a step, int64 [at most global_batch_size], in order. Costs the same for any step."""
        return self.sequences(self.positions(step))

    def sequences(self, positions: range) -> np.ndarray:
        """Sequence numbers at `positions` of the run, int64 [len(positions)]."""
        where = np.arange(positions.start, positions.stop, dtype=np.int64)
        epochs, within = np.divmod(where, self.num_sequences)
        if self.order is not None:
            return self.order[within]
        found = np.empty_like(where)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            found[chosen] = Permutation(self.num_sequences, key_of("epoch", self.seed, int(epoch)))(within[chosen])
        return found

    def next_position(self, step: int) -> int:
        """The `next_sequence` after `step`: all that a checkpoint needs to know of the data."""
        return self.positions(step).stop


def plan_run(
    num_sequences: int,
    *,
    seed: int,
    global_batch_size: int,
    epochs: float = 1.0,
    max_steps: int | None = None,
    first_step: int = 0,
    first_position: int = 0,
    order: np.ndarray | None = None,
) -> SamplePlan:
    """The plan of a run of `max_steps` full steps, or else of `epochs`, from where it stands.

    first_step, first_position: steps done, and the `next_sequence` of their checkpoint. order: see `SamplePlan`.
    """
    if num_sequences < 1:
        raise ValueError("a plan needs at least one sequence")
    if max_steps is not None:
        steps = max(max_steps, first_step)
        last = first_position + (steps - first_step) * global_batch_size
    else:
        last = max(sequences_of_run(num_sequences, epochs), first_position)
        steps = first_step + -(-(last - first_position) // global_batch_size)
    return SamplePlan(num_sequences, seed, global_batch_size, steps, last, first_step, first_position, order)
