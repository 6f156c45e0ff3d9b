"""What does not go with `--pipeline`; what the loaded model shows besides is told by `models/part.py`."""

from __future__ import annotations

from collections.abc import Callable

from fleetune.planning.rule import Asked, Rule
from fleetune.spec.stages import RUNS_PER_RANK


def _too_few_blocks(asked: Asked) -> str | None:
    schedule, shape = asked.spec.layout.pipeline_schedule, asked.shape
    runs = asked.layout.pipeline * RUNS_PER_RANK[schedule]
    if asked.layout.pipeline == 1 or shape is None or shape.num_layers >= runs:
        return None
    each = f", {RUNS_PER_RANK[schedule]} on each rank (pipeline_schedule {schedule})" if RUNS_PER_RANK[schedule] > 1 else ""
    return f"pipeline {asked.layout.pipeline} makes {runs} runs of blocks{each}, and the model has {shape.num_layers} blocks"


def _inside_stages(axis: str) -> Callable[[Asked], str | None]:
    def collides(asked: Asked) -> str | None:
        size = asked.layout.sizes()[axis]
        return f"pipeline {asked.layout.pipeline} and {axis} {size}" if asked.layout.pipeline > 1 and size > 1 else None

    return collides


PIPELINE_RULES = (
    Rule(
        what="`--pipeline N` and a model of fewer than N blocks (2 N under `--pipeline-schedule interleaved`)",
        collides=_too_few_blocks,
        why="each run needs a block of its own",
        instead="give a smaller --pipeline, or --shard, which divides anything",
    ),
    Rule(
        what="`--pipeline` and `--tensor`",
        collides=_inside_stages("tensor"),
        why="a stage computes whole layers",
        instead="give --pipeline with --replicate, or --tensor with --shard",
    ),
    Rule(
        what="`--pipeline` and `--shard`",
        collides=_inside_stages("shard"),
        why="a stage keeps its weights whole",
        instead="give --pipeline with --replicate, or --shard without --pipeline",
    ),
)
