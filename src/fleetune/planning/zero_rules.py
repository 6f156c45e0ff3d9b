"""What cannot be combined with DeepSpeed."""

from __future__ import annotations

from fleetune.planning.rule import Asked, Rule
from fleetune.planning.zero import asks_for_deepspeed, zero_of

_ENGINE = "deepspeed"


def _native_that_asks_for_deepspeed(asked: Asked) -> str | None:
    given = asks_for_deepspeed(asked.spec)
    return f"engine native and {', '.join(given)}" if asked.spec.zero.engine == "native" and given else None


def _another_axis(asked: Asked) -> str | None:
    axes = [f"{axis} {size}" for axis, size in asked.layout.sizes().items() if axis != "replicate" and size > 1]
    return f"DeepSpeed and {' × '.join(axes)}" if asked.engine == _ENGINE and axes else None


def _offload_of_nothing(asked: Asked) -> str | None:
    zero = zero_of(asked.spec)
    if asked.engine != _ENGINE or zero.stage > 0:
        return None
    if zero.offload != "none":
        return f"zero_stage 0 and offload {zero.offload}"
    return "zero_stage 0 and optimizer cpu_adam" if _is_elsewhere(asked) else None


def _is_elsewhere(asked: Asked) -> bool:
    return asked.spec.optimization.optimizer == "cpu_adam" and asked.device != "cpu"


def _offload_of_whole_parameters(asked: Asked) -> str | None:
    zero = zero_of(asked.spec)
    if asked.engine != _ENGINE or zero.offload != "parameters" or zero.stage in (0, 3):
        return None
    return f"zero_stage {zero.stage} and offload parameters"


ZERO_RULES = (
    Rule(
        what="`--engine native` and a setting that only DeepSpeed has",
        collides=_native_that_asks_for_deepspeed,
        why="only DeepSpeed can do that",
        instead="give --engine deepspeed, or leave out what asks for it",
    ),
    Rule(
        what="DeepSpeed and `--shard`, `--tensor` or `--pipeline`",
        collides=_another_axis,
        why="DeepSpeed spreads the training state over the ranks that share the batch, and over no other axis",
        instead="give --zero-stage 3 without the other axis, or the axis without DeepSpeed",
    ),
    Rule(
        what="`--zero-stage 0` and `--offload` or `--optimizer cpu_adam`",
        collides=_offload_of_nothing,
        why="DeepSpeed offloads what it has shared out, and stage 0 shares nothing",
        instead="give --zero-stage 1, 2 or 3, or --offload none with --optimizer adamw",
    ),
    Rule(
        what="`--offload parameters` below `--zero-stage 3`",
        collides=_offload_of_whole_parameters,
        why="below stage 3 every rank computes with whole parameters where they are",
        instead="give --zero-stage 3, or --offload optimizer",
    ),
)
