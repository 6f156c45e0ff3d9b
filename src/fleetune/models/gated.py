"""The product of a gated feed-forward layer, act(gate) * up (Shazeer 2020, arXiv 2002.05202), keeping its two inputs alone."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.nn import functional

from fleetune.models.row_chunks import row_chunks

Activation = Literal["silu", "gelu_tanh", "gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu")


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate) * up, all of one shape [..., F] and dtype."""
    return _Gated.apply(gate, up, activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        g, u = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
        return gated_rows(g, u, activation).view(gate.shape)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        g, u, d = (x.reshape(-1, x.shape[-1]) for x in (gate, up, d_y))
        d_gate, d_up = gated_gradients(g, u, d, ctx.activation)
        return d_gate.view(gate.shape), d_up.view(gate.shape), None


def gated_rows(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate) * up of rows [T, F], without autograd."""
    made = torch.empty_like(gate)
    for part in row_chunks(gate):
        torch.mul(_activated(gate[part], activation), up[part], out=made[part])
    return made


def gated_gradients(
    gate: torch.Tensor, up: torch.Tensor, d_rows: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, all [T, F]."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    for part in row_chunks(gate):
        own, d = gate[part], d_rows[part]
        torch.mul(_activated(own, activation), d, out=d_up[part])
        if activation == "silu":
            torch.ops.aten.silu_backward.grad_input(d * up[part], own, grad_input=d_gate[part])
        else:
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            torch.ops.aten.gelu_backward.grad_input(d * up[part], own, approximate=approximate, grad_input=d_gate[part])
    return d_gate, d_up


def _activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
