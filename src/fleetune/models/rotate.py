"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) of one tensor, in the form that rotates halves."""

from __future__ import annotations

from typing import Any

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + (-second half of x, first half of x) * sin, computed in the dtype of cos and sin. x: [..., d]; cos and sin
    broadcast to it.

    Keeps nothing of x. The result lies in memory as x does.
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        dtype, x = x.dtype, x.to(cos.dtype)
        half = x.shape[-1] // 2
        y = x * cos
        y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        y[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        dtype, d_y = d_y.dtype, d_y.to(cos.dtype)
        half = d_y.shape[-1] // 2
        d_x = d_y * cos
        d_x[..., :half].addcmul_(d_y[..., half:], sin[..., half:])
        d_x[..., half:].addcmul_(d_y[..., :half], sin[..., :half], value=-1)
        return d_x.to(dtype), None, None
