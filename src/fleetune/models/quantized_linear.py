"""Linear layers whose frozen weights rest quantised and are dequantised where a product needs them.

Both products of a step (forward, and the gradient of the input) make the weight again in the compute type and let it go:
one layer's weight exists at a time, whatever the depth of the model. Gradients are exactly those of the forward.
The quantised parts are buffers, not parameters: nothing that shards, casts or trains parameters touches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fleetune.models.quantization import PARTS, dequantize


class QuantizedLinear(nn.Module):
    """y = W x + b with W quantised and frozen, computed in `dtype`; stands where an `nn.Linear` or a `Conv1D` was.

    parts: the quantised weight, [out, in] also where it came from a Conv1D (then `was_conv1d`). bias: fp [out] or None.
    """

    def __init__(
        self,
        parts: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        scheme: str,
        *,
        dtype: torch.dtype,
        bias: nn.Parameter | None,
        was_conv1d: bool,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.scheme = scheme
        self.dtype = dtype
        self.was_conv1d = was_conv1d
        for name in PARTS[scheme]:
            self.register_buffer(name, parts[name], persistent=False)
        self.bias = bias

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the weight."""
        return self.out_features, self.in_features

    @property
    def device(self) -> torch.device:
        return self.parts()["codes"].device

    def parts(self) -> dict[str, torch.Tensor]:
        """The quantised weight, part by part."""
        return {name: self.get_buffer(name) for name in PARTS[self.scheme]}

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [out, in] as it is computed with, a new tensor; in `dtype`, if another than the compute type is wished.

        It is rounded to the compute type first: what training saw is what another type is made of.
        """
        weight = dequantize(self.parts(), self.shape, self.scheme, self.dtype)
        return weight if dtype is None else weight.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the compute type."""
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        rows = _QuantizedProduct.apply(x.reshape(-1, x.shape[-1]), self, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.scheme}, in_features={self.in_features}, out_features={self.out_features}"


class _QuantizedProduct(torch.autograd.Function):
    """[T, in] -> [T, out]. Keeps nothing for the backward but the layer itself."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layer: QuantizedLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(rows, layer.dense(), bias)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_rows, _, needs_bias = ctx.needs_input_grad
        return d_y @ ctx.layer.dense() if needs_rows else None, None, d_y.sum(0) if needs_bias else None


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLinear]:
    """Every quantised layer within `module`, by its name there."""
    return {name: part for name, part in module.named_modules() if isinstance(part, QuantizedLinear)}


def resting_parts(module: nn.Module) -> list[torch.Tensor]:
    """All parts of all quantised weights within `module`."""
    return [part for layer in quantized_layers(module).values() for part in layer.parts().values()]


def parts_bytes(module: nn.Module) -> int:
    """Bytes of all quantised weights within `module`."""
    return sum(part.numel() * part.element_size() for part in resting_parts(module))
