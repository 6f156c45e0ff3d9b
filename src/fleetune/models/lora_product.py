"""Low-rank layers as single operations: the frozen product and the adapter's, of one layer or of several that read one input.

The frozen weights get no gradient. Of what is computed only x A^T is kept (tokens x rank, far smaller than x); a weight that
rests quantised is made again in the backward. The first products of layers that read one input are one product, and so are
the gradients of their first matrices: products with so few columns are bound by reading the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from fleetune.models.gated import Activation, gated_gradients, gated_rows
from fleetune.models.quantized_linear import QuantizedLinear

#: A frozen weight [out, in]: a tensor, or the quantised layer that makes it.
Frozen: TypeAlias = torch.Tensor | QuantizedLinear


@dataclass(frozen=True)
class Factors:
    """y = x weight^T + bias + scale * (x a^T) b^T. weight: [out, in], frozen. bias: [out] or None. a: [rank, in] and
    b: [out, rank], in the dtype of x."""

    weight: Frozen
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def dense(self) -> torch.Tensor:
        """The frozen weight as a tensor; of a quantised one made anew."""
        return self.weight.dense() if isinstance(self.weight, QuantizedLinear) else self.weight

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What autograd is told of."""
        return None if isinstance(self.weight, QuantizedLinear) else self.weight, self.bias, self.a, self.b


def lora_products(rows: torch.Tensor, layers: Sequence[Factors]) -> tuple[torch.Tensor, ...]:
    """rows [T, in] -> [T, out] of each layer; only `rows` is kept, once for all."""
    rest = tuple((layer.weight if isinstance(layer.weight, QuantizedLinear) else None, layer.scale) for layer in layers)
    return _Products.apply(rows, rest, *(tensor for layer in layers for tensor in layer.tensors()))


def gated_product(gate: torch.Tensor, up: torch.Tensor, activation: Activation, layer: Factors) -> torch.Tensor:
    """The layer of act(gate) * up, both [T, in] -> [T, out]; the two are kept, their product is made again."""
    quantized = layer.weight if isinstance(layer.weight, QuantizedLinear) else None
    return _GatedProduct.apply(gate, up, activation, (quantized, layer.scale), *layer.tensors())


def _products(rows: torch.Tensor, layers: Sequence[Factors]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """[T, out] of each layer, and x a^T of all side by side, [T, ranks]."""
    low = rows @ _joined([layer.a for layer in layers]).t()
    made, start = [], 0
    for layer in layers:
        y = nn.functional.linear(rows, layer.dense(), layer.bias)
        end = start + len(layer.a)
        made.append(y.addmm_(low[:, start:end], layer.b.t(), alpha=layer.scale))
        start = end
    return tuple(made), low


def _gradients(
    rows: torch.Tensor,
    low: torch.Tensor,
    layers: Sequence[Factors],
    d_ys: Sequence[torch.Tensor],
    *,
    needs_rows: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """The gradient of the rows, and of (weight, bias, a, b) of each layer."""
    d_low = torch.empty_like(low)
    of_b, start = [], 0
    for layer, d_y in zip(layers, d_ys):
        own = slice(start, start + len(layer.a))
        start = own.stop
        d_low[:, own] = (d_y @ layer.b).mul_(layer.scale)
        of_b.append((d_y.t() @ low[:, own]).mul_(layer.scale))
    of_a = (d_low.t() @ rows).split([len(layer.a) for layer in layers])
    d_rows = None
    if needs_rows:
        for layer, d_y in zip(layers, d_ys):
            dense = layer.dense()
            d_rows = d_y @ dense if d_rows is None else d_rows.addmm_(d_y, dense)
        assert d_rows is not None
        d_rows.addmm_(d_low, _joined([layer.a for layer in layers]))
    found: list[torch.Tensor | None] = []
    for layer, d_y, d_a, d_b in zip(layers, d_ys, of_a, of_b):
        found += [None, d_y.sum(0) if needs_bias and layer.bias is not None else None, d_a, d_b]
    return d_rows, found


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _layers(rest: Sequence[tuple[QuantizedLinear | None, float]], tensors: Sequence[torch.Tensor | None]) -> list[Factors]:
    layers = []
    for number, (quantized, scale) in enumerate(rest):
        weight, bias, a, b = tensors[4 * number : 4 * number + 4]
        frozen = weight if quantized is None else quantized
        assert frozen is not None and a is not None and b is not None
        layers.append(Factors(frozen, bias, a, b, scale))
    return layers


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, rest: tuple, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        made, low = _products(rows, _layers(rest, tensors))
        ctx.save_for_backward(rows, low, *tensors)
        ctx.rest = rest
        return made

    @staticmethod
    def backward(ctx: Any, *d_ys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows, low, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_rows, found = _gradients(
            rows, low, _layers(ctx.rest, tensors), d_ys, needs_rows=needs[0], needs_bias=any(needs[3::4])
        )
        return d_rows, None, *found


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        activation: Activation,
        rest: tuple[QuantizedLinear | None, float],
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        (y,), low = _products(gated_rows(gate, up, activation), _layers([rest], tensors))
        ctx.save_for_backward(gate, up, low, *tensors)
        ctx.activation, ctx.rest = activation, rest
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up, low, *tensors = ctx.saved_tensors
        rows, layers = gated_rows(gate, up, ctx.activation), _layers([ctx.rest], tensors)
        d_rows, found = _gradients(rows, low, layers, [d_y], needs_rows=True, needs_bias=ctx.needs_input_grad[5])
        assert d_rows is not None
        return *gated_gradients(gate, up, d_rows, ctx.activation), None, None, *found
