"""The section of the spec that says which devices there are, and how one model is spread over them."""

from __future__ import annotations

from typing import Literal

from fleetune.spec.section import Section as _Section
from fleetune.spec.section import declare as _field

_ZERO_BUBBLE = (
    "computes the gradients of weights apart from those of inputs, past the hooks by which data parallel sums them over its "
    "ranks, and is wrong there without a word"
)


class LayoutSection(_Section):
    """Which devices, and how the work is spread over them."""

    gpus: int | None = _field(
        None,
        "Processes in all, N or MIN:MAX: one per GPU, or CPU processes where there is none. Empty: all GPUs, else 1.",
        aliases=("num_gpus", "processes"),
        ge=1,
        le=4096,
        resume=True,
    )
    min_gpus: int | None = _field(
        None,
        "Go on with so few processes where devices fail; --gpus 2:4 gives both. Empty: always as many as --gpus.",
        ge=1,
        le=4096,
        resume=True,
    )
    replicate: int | None = _field(
        None,
        "Copies of the model, each on its own share of every step. Empty: the processes that the other axes leave.",
        ge=1,
        le=4096,
        resume=True,
    )
    shard: int | None = _field(
        None,
        "Ranks that keep one copy of the model in pieces and put each block together only while it computes. Empty: 1.",
        ge=1,
        le=4096,
        resume=True,
    )
    tensor: int | None = _field(
        None,
        "Ranks that compute every layer together, each its part of the heads and columns. Empty: 1.",
        ge=1,
        le=64,
        resume=True,
    )
    accumulate: Literal["shards", "once"] = _field(
        "shards",
        "Under --shard, with several micro-batches a step. shards: sum each one's gradients over the ranks and keep pieces. "
        "once: keep whole gradients and communicate at the step's end: less traffic, more memory.",
        resume=True,
    )
    pipeline: int | None = _field(
        None,
        "Stages: runs of the model's blocks, each on ranks of its own, that hand micro-batches on. Empty: 1.",
        ge=1,
        le=1024,
        resume=True,
    )
    pipeline_schedule: Literal["1f1b", "interleaved"] = _field(
        "1f1b",
        "Order of the micro-batches in a pipeline. 1f1b: one forward, one backward. interleaved: the same with two runs of "
        "blocks on each rank, which halves the wait at both ends of a step and doubles what is sent.",
        resume=True,
        refused=(("zero", _ZERO_BUBBLE),),
    )
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "What computes. auto: CUDA where there is a GPU.", resume=True)
    threads: int | None = _field(
        None, "Threads per process on a CPU. Empty: the cores, shared out.", ge=1, le=1024, resume=True
    )

    def axes(self) -> dict[str, int | None]:
        """What was asked of each axis of the layout, outermost first."""
        return {"pipeline": self.pipeline, "replicate": self.replicate, "shard": self.shard, "tensor": self.tensor}
