"""Low-rank adapters on stacked experts, with the weights and results of PEFT's `target_parameters`.

A stack is one parameter of a module that computes with all experts: `[experts, out, in]`, or `[experts, in, out]` where the
module says that it is transposed. While that module's forward runs, reading the parameter gives an `AdaptedStack`: taking one
expert of it and multiplying by that is the expert's own matrix and its adapter's, without ever making their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fleetune.models.lora import AdapterSettings, Factor, keyed_uniform
from fleetune.models.lora_product import Factors, lora_products

#: What stands behind a parameter's name in the name of the module that holds its adapter.
SUFFIX = "_lora"


class LoraStack(nn.Module):
    """The adapter of one stack: `lora_A.weight` [rank * experts, in], `lora_B.weight` [out, rank * experts], fp32.

    A's rows are expert after expert; B's columns are rank after rank, as PEFT has them.
    """

    def __init__(self, stack: torch.Tensor, name: str, settings: AdapterSettings, seed: int, *, transposed: bool) -> None:
        super().__init__()
        self.num_experts = int(stack.shape[0])
        self.transposed = transposed
        self.out_features, self.in_features = (int(size) for size in (stack.shape[:0:-1] if transposed else stack.shape[1:]))
        self.rank = settings.rank_of(name)
        self.scale = settings.scale_of(name)
        rows = self.rank * self.num_experts
        first = keyed_uniform((rows, self.in_features), self.in_features**-0.5, seed, f"{name}{SUFFIX}.lora_A.weight")
        self.lora_A = Factor(first.to(stack.device))
        self.lora_B = Factor(torch.zeros(self.out_features, rows, device=stack.device))

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [experts, rank, in], B [experts, out, rank]), views."""
        a = self.lora_A.weight.view(self.num_experts, self.rank, self.in_features)
        return a, self.lora_B.weight.view(self.out_features, self.rank, self.num_experts).permute(2, 0, 1)

    def adapted(self, stack: torch.Tensor) -> AdaptedStack:
        return AdaptedStack(stack, *self.factors(), self.scale, self.transposed)


class AdaptedStack:
    """What a module's forward sees in the place of a stack. Whatever is not one expert of it gets the sum, made for it."""

    def __init__(self, stack: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, transposed: bool) -> None:
        self._stack, self._a, self._b, self._scale, self._transposed = stack, a, b, scale, transposed

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) or (isinstance(index, torch.Tensor) and index.ndim == 0):
            expert = int(index)
            return _AdaptedExpert(self._stack[expert], self._a[expert], self._b[expert], self._scale, self._transposed)
        return self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def whole(self) -> torch.Tensor:
        change = torch.bmm(self._b, self._a) * self._scale
        return self._stack + (change.mT if self._transposed else change).to(self._stack.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(_plain(value) for value in args), **{key: _plain(value) for key, value in (kwargs or {}).items()})


class _AdaptedExpert:
    """One expert's matrix with its adapter, as an operand of a product."""

    def __init__(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, transposed: bool) -> None:
        self._weight, self._a, self._b, self._scale, self._transposed = weight, a, b, scale, transposed

    def whole(self) -> torch.Tensor:
        change = (self._b @ self._a) * self._scale
        return self._weight + (change.t() if self._transposed else change).to(self._weight.dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, *, as_linear: bool) -> torch.Tensor:
        """x [..., in] times this, as `linear` ([out, in]) or `matmul` ([in, out]) would."""
        if as_linear == self._transposed:
            whole = self.whole()
            return nn.functional.linear(x, whole if as_linear else whole.t(), bias)
        weight = self._weight.t() if self._transposed else self._weight
        rows = x.reshape(-1, x.shape[-1]).to(weight.dtype)
        (y,) = lora_products(rows, [Factors(weight, bias, self._a.to(rows.dtype), self._b.to(rows.dtype), self._scale)])
        return y.view(*x.shape[:-1], y.shape[-1])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(args) >= 2 and isinstance(args[1], _AdaptedExpert) and isinstance(args[0], torch.Tensor):
            if func is nn.functional.linear:
                return args[1].product(args[0], args[2] if len(args) > 2 else kwargs.get("bias"), as_linear=True)
            if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
                return args[1].product(args[0], None, as_linear=False)
        return func(*(_plain(value) for value in args), **{key: _plain(value) for key, value in kwargs.items()})


def _plain(value: Any) -> Any:
    return value.whole() if isinstance(value, (AdaptedStack, _AdaptedExpert)) else value


def adapt_stack(owner: nn.Module, leaf: str, name: str, settings: AdapterSettings, seed: int) -> None:
    """Put an adapter beside the parameter `leaf` of `owner`, whose forward then computes with both.

    The owner must take its experts one by one: the caller chooses that implementation on the model's config.
    """
    stack = owner._parameters[leaf]
    assert stack is not None
    layer = LoraStack(stack, name, settings, seed, transposed=bool(getattr(owner, "is_transposed", False)))
    owner.add_module(f"{leaf}{SUFFIX}", layer.train(owner.training))
    if not hasattr(type(owner), "adapted_leaves"):
        owner.__class__ = _with_adapters(type(owner))
        owner.adapted_leaves = ()  # type: ignore[assignment]
    owner.adapted_leaves = (*owner.adapted_leaves, leaf)  # type: ignore[misc, assignment, operator]


def _with_adapters(cls: type[nn.Module]) -> type[nn.Module]:
    """The class whose forward reads adapted stacks; outside of it a parameter is what it was, for whoever shards or saves."""

    class WithAdapters(cls):  # type: ignore[misc, valid-type]
        adapted_leaves: tuple[str, ...] = ()
        is_computing = False

        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if name in type(self).__dict__ or name.endswith(SUFFIX) or not self.__dict__.get("is_computing"):
                return value
            if name in self.__dict__["adapted_leaves"]:
                return self._modules[f"{name}{SUFFIX}"].adapted(value)  # type: ignore[union-attr, operator]
            return value

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.is_computing = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.is_computing = False

    WithAdapters.__name__ = WithAdapters.__qualname__ = cls.__name__
    return WithAdapters
