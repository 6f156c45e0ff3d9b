"""From hidden states to logits: a matrix, a bias, and the two things that families put behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Head:
    """logits = cap(scale * (hidden @ weight.T + bias)), where cap(z) = softcap * tanh(z / softcap).

    weight: [V, H], frozen or trained, perhaps tied to the embedding. bias: [V] or None.
    dtype: in which the matrix product is made; scale, cap and everything after are in fp32. fused: the loss makes logits and
    their gradient chunk by chunk; else all of them exist.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    scale: float = 1.0
    softcap: float | None = None
    fused: bool = True

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> fp32 [..., V], with a gradient; for evaluation and generation, a few rows at a time."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        logits = torch.nn.functional.linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias).float()
        return self.capped(logits)

    def capped(self, raw: torch.Tensor) -> torch.Tensor:
        """Scale and cap of fp32 products."""
        if self.scale != 1.0:
            raw = raw * self.scale
        if self.softcap is not None:
            raw = torch.tanh(raw / self.softcap) * self.softcap
        return raw
