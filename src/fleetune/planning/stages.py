"""Which weights lie on each rank of a pipeline, told from their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetune.spec.model_shape import ModelShape
from fleetune.spec.stages import Stage, runs_of_blocks


@dataclass(frozen=True)
class StageWeights:
    """What lies on one stage. names: of the model's parameters. blocks: numbers of its blocks."""

    names: frozenset[str]
    blocks: frozenset[int]


def stage_weights(shape: ModelShape, num_stages: int, schedule: str) -> Iterator[StageWeights]:
    """The stages in order.

    Outside the blocks the embedding lies on the first stage and the head on the last (both where they are one), and all
    else on each. Raises UserError where there are fewer blocks than runs.
    """
    for number in range(num_stages):
        stage = Stage.of_rank(number, num_stages, schedule)
        runs = runs_of_blocks(shape.num_layers, stage.num_runs)
        blocks = frozenset(block for run in stage.own for block in runs[run])
        yield StageWeights(frozenset(name for name in shape.parameters if _lies_on(shape, name, stage, blocks)), blocks)


def _lies_on(shape: ModelShape, name: str, stage: Stage, blocks: frozenset[int]) -> bool:
    if name in shape.blocks:
        return shape.blocks[name] in blocks
    if name not in shape.embeddings:
        head = shape.embeddings[-1].removesuffix("weight")
        return stage.is_last or shape.tied or not name.startswith(head)  # a head's bias goes with it
    is_embedding, is_head = name == shape.embeddings[0], shape.tied or name != shape.embeddings[0]
    return (is_embedding and stage.is_first) or (is_head and stage.is_last)


def block_of(name: str) -> int:
    """The block of an adapter's weight: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


def waiting_share(num_micro_batches: int, num_stages: int, runs_per_rank: int) -> float:
    """Share of a step in which a rank waits at both ends of it (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    ends = (num_stages - 1) / runs_per_rank
    return ends / (num_micro_batches + ends)
