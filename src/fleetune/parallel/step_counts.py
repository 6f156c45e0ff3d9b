"""What a step is about, counted over all ranks before its forward: every engine divides its losses by the same number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetune.parallel.world import World
from fleetune.spec.errors import UserError
from fleetune.spec.records import MicroBatch


@dataclass(frozen=True)
class StepCounts:
    """trained_tokens, tokens: of the whole global batch. rounds: micro-batches of the data rank that has most."""

    trained_tokens: int
    tokens: int
    rounds: int


def count_step(world: World, micro_batches: Sequence[MicroBatch]) -> StepCounts:
    """All ranks, each with its own share; tensor and pipeline peers with the same one.

    Raises UserError, on all ranks, where the global batch has no trained token.
    """
    shares = [0.0] * world.data_ranks
    shares[world.data_rank] = len(micro_batches)
    mine = [sum(batch.num_trained_tokens for batch in micro_batches), sum(batch.num_tokens for batch in micro_batches)]
    trained_tokens, tokens, *rounds = (int(count) for count in world.sum_shares([*mine, *shares]))
    if trained_tokens == 0:
        samples = [sample for batch in micro_batches for sample in batch.samples] if world.layout.speaks(world.rank) else []
        everybody = [sample for part in world.gather_json(samples) for sample in part]
        raise UserError(
            f"no token of this step is trained, so there is nothing to learn from: {', '.join(everybody[:8])}"
            f"{' and others' if len(everybody) > 8 else ''} ({len(everybody)} samples). See what is trained with "
            "fleetune data inspect, and give --train-on all or remove these rows"
        )
    return StepCounts(trained_tokens, tokens, max(rounds))


def check_weight(batch: MicroBatch, weight: int) -> None:
    """Raises RuntimeError where an objective counted otherwise than the batch: the mean would be wrong."""
    if weight != batch.num_trained_tokens:
        raise RuntimeError(
            f"the objective gave weight {weight} to micro-batch {batch.number} of step {batch.step}, which has "
            f"{batch.num_trained_tokens} trained tokens"
        )
