"""Bytes of parameters, gradients and optimizer state on one rank: the first one, whose pieces are the largest.

Exact under replicate and shard; under tensor parallel at most, since only the model's own plan tells which layers are cut.
Activations, and the block that a sharded model puts together while it computes, are not in it: they come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fleetune.planning.zero import Zero
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import LinearShape
from fleetune.spec.quantized import is_quantizable, quantized_bytes

Shape = tuple[int, ...]

#: Bytes of a frozen parameter by precision. `auto` counts as the largest: only the device will tell.
PRECISION_BYTES = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
#: What is trained, its gradient (one flat buffer) and AdamW's two moments are fp32, whatever is computed in.
_FP32_BYTES = 4
_ADAMW_MOMENTS = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. frozen_bytes are memory-mapped, and shared by the processes of a node on CPUs.

    quantized_bytes: those of them that rest quantised, which are `quantized_parameters` weights.
    """

    frozen_bytes: int
    trained_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    quantized_bytes: int = 0
    quantized_parameters: int = 0

    @property
    def parameter_bytes(self) -> int:
        return self.frozen_bytes + self.trained_bytes

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def rank_memory(
    base: Iterable[tuple[Shape, bool]],
    adapter: Iterable[Shape] | None,
    *,
    precision: str,
    layout: Layout,
    accumulate: str = "shards",
    resting: tuple[int, int] = (0, 0),
) -> RankMemory:
    """base: (shape, whether it is a linear layer of a block) of every parameter of the model. adapter: shapes of the adapter's,
    None where all of the model is trained. accumulate: when a sharded model's gradients are communicated. resting: what
    `quantised` says of the weights that rest quantised; only a whole model has any."""
    base = list(base)
    kept = sum(_kept(shape, layout) // (layout.tensor if is_linear else 1) for shape, is_linear in base)
    resting_bytes, count = resting
    frozen = (kept - count) * PRECISION_BYTES[precision] + resting_bytes if adapter is not None else 0
    shapes = [shape for shape, _ in base] if adapter is None else list(adapter)
    trained = (kept if adapter is None else sum(_kept(shape, layout) for shape in shapes)) * _FP32_BYTES
    whole = sum(math.prod(shape) for shape in shapes) * _FP32_BYTES
    gradients = whole if layout.shard > 1 and accumulate == "once" else trained
    return RankMemory(frozen, trained, gradients, trained * _ADAMW_MOMENTS, resting_bytes, count)


def quantised(linears: Iterable[LinearShape], scheme: str) -> tuple[int, int]:
    """(bytes, number of weights) of the blocks' linear layers that rest quantised; (0, 0) for `none`."""
    shapes = [] if scheme == "none" else [(linear.num_out, linear.num_in) for linear in linears]
    shapes = [shape for shape in shapes if is_quantizable(*shape)]
    return sum(quantized_bytes(scheme, *shape) for shape in shapes), sum(math.prod(shape) for shape in shapes)


def _kept(shape: Shape, layout: Layout) -> int:
    """Values of the largest piece: the first dim is cut into pieces of equal size, the last ones smaller."""
    return -(-shape[0] // layout.shard) * math.prod(shape[1:])


def under_zero(whole: RankMemory, zero: Zero, ranks: int) -> RankMemory:
    """What is left on one of so many ranks when DeepSpeed shares it out.

    Stages 1 and 2, and offload, keep an fp32 copy of a rank's share of the parameters beside the moments. Offloaded bytes
    count too: they lie in host memory. Buffers through which gradients and parameters pass come on top.
    """
    stage = zero.stage

    def share(num_bytes: int, is_shared: bool) -> int:
        return -(-num_bytes // ranks) if is_shared else num_bytes

    copy = share(whole.trained_bytes, True) if stage in (1, 2) or (stage == 3 and zero.offload != "none") else 0
    return RankMemory(
        frozen_bytes=share(whole.frozen_bytes, stage == 3),
        trained_bytes=share(whole.trained_bytes, stage == 3),
        gradient_bytes=share(whole.gradient_bytes, stage >= 2),
        optimizer_bytes=share(whole.optimizer_bytes, stage >= 1) + copy,
    )
