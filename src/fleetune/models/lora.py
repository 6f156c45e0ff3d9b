"""Low-rank adapters as layers: LoRA (Hu et al. 2021, arXiv 2106.09685), rsLoRA (Kalajdzievski 2023, arXiv 2312.03732)
and DoRA (Liu et al. 2024, arXiv 2402.09353), with the weights, names and results of PEFT's.

A `LoraLinear` takes the place of a linear layer and keeps that layer's own parameters under their own names, so the base
model's names do not change; the adapter's are `lora_A.weight`, `lora_B.weight` and `lora_magnitude_vector` beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from fleetune.models.dropout import KeyedDropout, Randomness, name_key
from fleetune.models.gated import Activation
from fleetune.models.lora_product import Factors, Frozen, gated_product, lora_products
from fleetune.models.quantized_linear import QuantizedLinear

AdapterKind = Literal["lora", "dora", "rslora"]


@dataclass(frozen=True)
class AdapterSettings:
    """What an adapter is, apart from its weights.

    targets: full names of the linear layers that have one. short_targets: endings of names that mean exactly those, as
    people write them; empty where there are none. ranks, alphas: of those that differ from rank and alpha.
    stacks: full names of stacked expert parameters that have one (see `lora_experts`).
    transposed: whether the base weights are [in, out] (transformers' Conv1D; PEFT's `fan_in_fan_out`).
    """

    kind: AdapterKind
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    transposed: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    short_targets: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()

    def weight_names(self) -> list[str]:
        """Names in the model of every weight of the adapter."""
        linears = [f"{target}.{kind}" for target in self.targets for kind in weight_names(self.kind)]
        return linears + [f"{stack}_lora.{kind}" for stack in self.stacks for kind in weight_names("lora")]

    def renamed(self, names: Mapping[str, str]) -> AdapterSettings:
        """The same adapter with its targets under other names."""
        return replace(
            self,
            targets=tuple(names[target] for target in self.targets),
            stacks=tuple(names[stack] for stack in self.stacks),
            ranks=tuple((names[target], rank) for target, rank in self.ranks),
            alphas=tuple((names[target], alpha) for target, alpha in self.alphas),
        )

    def rank_of(self, target: str) -> int:
        return dict(self.ranks).get(target, self.rank)

    def scale_of(self, target: str) -> float:
        """What the product of the two matrices is multiplied by."""
        rank, alpha = self.rank_of(target), dict(self.alphas).get(target, self.alpha)
        return alpha / math.sqrt(rank) if self.kind == "rslora" else alpha / rank


def weight_names(kind: AdapterKind) -> tuple[str, ...]:
    """Names of an adapter's weights beside the base layer's own."""
    names = ("lora_A.weight", "lora_B.weight")
    return (*names, "lora_magnitude_vector") if kind == "dora" else names


class Factor(nn.Module):
    """One matrix of an adapter: fp32 [rows, columns], a module of its own so that it is named `<factor>.weight`."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


class LoraLinear(nn.Module):
    """y = W x + b + scale * B A drop(x), with W and b frozen; DoRA rescales the rows of W + scale * B A to a learned norm.

    base: `nn.Linear`, or transformers' `Conv1D` (then `transposed`), whose parameters are taken over as they are; or a
    `QuantizedLinear`, which is kept as `quantized`. The adapter's weights are fp32; products are made in the dtype of the
    base, DoRA's norms in fp32.
    """

    def __init__(self, base: nn.Module, name: str, settings: AdapterSettings, seed: int, randomness: Randomness) -> None:
        super().__init__()
        self.quantized = base if isinstance(base, QuantizedLinear) else None
        self.register_parameter("weight", None if self.quantized is not None else base.weight)
        self.bias = base.bias
        if self.quantized is not None:
            base.bias = None  # one owner, so that no parameter has two names
        self.transposed = type(base).__name__ == "Conv1D"
        self.scale = settings.scale_of(name)
        weight: Frozen = self.quantized if self.quantized is not None else self.oriented()
        shape: tuple[int, ...] = tuple(weight.shape)
        self.out_features, self.in_features = shape
        device = weight.device
        rank = settings.rank_of(name)
        bound = 1 / math.sqrt(self.in_features)  # PEFT's: kaiming_uniform_(a=sqrt(5))
        shape = (rank, self.in_features)
        if device.type == "meta":  # the base layer lies on another rank, and so does its adapter
            self.lora_A = Factor(torch.empty(shape, device=device))
        else:
            self.lora_A = Factor(keyed_uniform(shape, bound, seed, f"{name}.lora_A.weight").to(device))
        self.lora_B = Factor(torch.zeros(self.out_features, rank, device=device))
        magnitude = (
            nn.Parameter(torch.linalg.vector_norm(self.dense().detach().float(), dim=1)) if settings.kind == "dora" else None
        )
        self.register_parameter("lora_magnitude_vector", magnitude)
        self.lora_dropout = KeyedDropout(settings.dropout, f"{name}.lora_dropout", randomness)
        #: Where this rank has only some columns of the input: sums a tensor over the ranks that have the others.
        self.over_peers: Callable[[torch.Tensor], None] | None = None
        #: Other layers that are given the same input.
        self.shared: SharedInput | None = None
        #: Whether to compute with plain operations of torch, as a check of the fused ones.
        self.plain = False

    @property
    def is_fused(self) -> bool:
        """Whether the layer and its adapter are one operation now."""
        drops = self.training and self.lora_dropout.p > 0
        return not (self.plain or drops or self.lora_magnitude_vector is not None)

    def factors(self) -> Factors:
        """The layer as products, in the dtype of the base."""
        weight: Frozen = self.oriented() if self.quantized is None else self.quantized
        a, b = self.lora_A.weight.to(weight.dtype), self.lora_B.weight.to(weight.dtype)
        return Factors(weight, self.bias, a, b, self.scale)

    def of_gated(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The layer of act(gate) * up, both [..., in]; for a fused layer."""
        factors = self.factors()
        g, u = (x.reshape(-1, x.shape[-1]).to(factors.weight.dtype) for x in (gate, up))
        return gated_product(g, u, activation, factors).view(*gate.shape[:-1], self.out_features)

    def oriented(self) -> torch.Tensor:
        """The base weight as [out, in], a view; of a base that is not quantised."""
        return self.weight.t() if self.transposed else self.weight

    def dense(self) -> torch.Tensor:
        """The base weight as [out, in]; of a quantised base a new tensor."""
        return self.oriented() if self.quantized is None else self.quantized.dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the dtype of the base."""
        if self.is_fused:
            return _together([self], x)[0] if self.shared is None else self.shared.product(self, x)
        weight: Frozen = self.oriented() if self.quantized is None else self.quantized
        if x.dtype != weight.dtype:
            x = x.to(weight.dtype)
        a, b = self.lora_A.weight.to(x.dtype), self.lora_B.weight.to(x.dtype)
        dropped = self.lora_dropout(x)
        if self.lora_magnitude_vector is not None:
            return self._dora(x, dropped, weight, a, b)
        y = _product(x, weight, self.bias)
        return y + nn.functional.linear(nn.functional.linear(dropped, a), b) * self.scale

    def _dora(self, x: torch.Tensor, dropped: torch.Tensor, weight: Frozen, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The norm of the rows is a constant for the gradient (section 4.3 of the paper).

        With dropout the base's part of what is rescaled sees the dropped input, as in PEFT: y = W x + b +
        (m / norm - 1) W x' + m / norm * scale * B A x', where x' = drop(x).
        """
        factor = self.lora_magnitude_vector / self._row_norms()
        low = nn.functional.linear(nn.functional.linear(dropped, a), b) * self.scale
        plain = _product(x, weight, None)
        rescaled = plain if dropped is x else _product(dropped, weight, None)
        y = plain + (factor - 1).to(x.dtype) * rescaled + factor.to(x.dtype) * low
        return y if self.bias is None else y + self.bias

    def _row_norms(self) -> torch.Tensor:
        """fp32 [out]: norms of the rows of W + scale * B A, without a gradient."""
        with torch.no_grad():
            merged = torch.addmm(self.dense().float(), self.lora_B.weight, self.lora_A.weight, alpha=self.scale)
            if self.over_peers is None:
                return torch.linalg.vector_norm(merged, dim=1)
            squares = merged.square().sum(1)
            self.over_peers(squares)
            return squares.sqrt()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.lora_A.weight.shape[0]}"


def _product(x: torch.Tensor, weight: Frozen, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b of the frozen weight."""
    if isinstance(weight, torch.Tensor):
        return nn.functional.linear(x, weight, bias)
    y = weight(x)
    return y if bias is None else y + bias


class SharedInput:
    """Layers of one block that are given one input (query, key and value; gate and up), found by running the model once.

    The first of them to be called computes all; the others, called with the very same tensor, take what is theirs. A layer
    that is called with another tensor computes by itself.
    """

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        self._layers = tuple(layers)
        self._given: torch.Tensor | None = None
        self._ready: dict[LoraLinear, torch.Tensor] = {}
        for layer in layers:
            layer.shared = self

    def product(self, layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] of one of the layers."""
        if x is not self._given or layer not in self._ready:
            layers = [layer, *(other for other in self._layers if other is not layer and other.is_fused)]
            self._given, self._ready = x, dict(zip(layers, _together(layers, x)))
        y = self._ready.pop(layer)
        if not self._ready:
            self._given = None
        return y


def _together(layers: Sequence[LoraLinear], x: torch.Tensor) -> list[torch.Tensor]:
    factors = [layer.factors() for layer in layers]
    rows = x.reshape(-1, x.shape[-1]).to(factors[0].weight.dtype)
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in lora_products(rows, factors)]


def keyed_uniform(shape: tuple[int, ...], bound: float, seed: int, name: str) -> torch.Tensor:
    """fp32 on the CPU, uniform in [-bound, bound): a function of (seed, name), whatever any random state is."""
    generator = torch.Generator().manual_seed(name_key("initial", seed, name))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
