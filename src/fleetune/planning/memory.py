"""Exact bytes of parameters, gradients and optimizer state on one rank of the replicate layout.

Activations are not in it: they depend on the rows, and come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of a frozen parameter by precision. `auto` counts as the largest: only the device will tell.
PRECISION_BYTES = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
#: What is trained, its gradient (one flat buffer) and AdamW's two moments are fp32, whatever is computed in.
_FP32_BYTES = 4
_ADAMW_MOMENTS = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. frozen_bytes are memory-mapped, and shared by the processes of a node on CPUs."""

    frozen_bytes: int
    trained_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def parameter_bytes(self) -> int:
        return self.frozen_bytes + self.trained_bytes

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def rank_memory(num_parameters: int, trainable: int, *, method: str, precision: str) -> RankMemory:
    """num_parameters: of the model without an adapter. trainable: what is trained: all of them, or the adapter's."""
    frozen = num_parameters * PRECISION_BYTES[precision] if method == "lora" else 0
    trained = trainable * _FP32_BYTES
    return RankMemory(frozen, trained, trained, trained * _ADAMW_MOMENTS)
