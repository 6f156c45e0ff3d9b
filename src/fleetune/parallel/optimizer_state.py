"""What an optimizer keeps for each parameter: found by trying it, and made before the first step.

torch's optimizers make their state in their first step. Made at once, as zeros, it is in every checkpoint under the same
names, it can be loaded into a fresh engine, and its memory is taken before training begins rather than in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: factory(named parameters) -> optimizer; its learning rate is set before each step.
OptimizerFactory = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Role:
    """One kind of state. like_parameter: of the parameter's shape, else a scalar."""

    name: str
    like_parameter: bool
    dtype: torch.dtype
    device: torch.device

    def zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        shape = parameter.shape if self.like_parameter else ()
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def find_roles(factory: OptimizerFactory, device: torch.device) -> tuple[Role, ...]:
    """The state of one parameter, found by a step of a tiny one. Raises TypeError where it is not made of tensors that
    begin as zeros: such an optimizer needs its own way into a checkpoint."""
    optimizer, parameter = _tiny(factory, device)
    fresh = _after_step(optimizer, parameter)
    roles = tuple(_role(type(optimizer).__name__, name, value, parameter) for name, value in optimizer.state[parameter].items())
    optimizer, parameter = _tiny(factory, device)
    fill_state(optimizer, [parameter], roles)
    from_zeros = _after_step(optimizer, parameter)
    if fresh.keys() != from_zeros.keys() or not all(torch.equal(fresh[name], from_zeros[name]) for name in fresh):
        raise TypeError(
            f"the state of {type(optimizer).__name__} does not begin as zeros: it cannot be made before its first step"
        )
    return roles


def fill_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], roles: Sequence[Role]) -> None:
    """Give each parameter its state, all zeros."""
    for parameter in parameters:
        optimizer.state[parameter] = {role.name: role.zeros(parameter) for role in roles}


def _tiny(factory: OptimizerFactory, device: torch.device) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.ones(2, 3, device=device))
    parameter.grad = torch.arange(6, dtype=torch.float32, device=device).view(2, 3) / 4
    optimizer = factory([("tiny", parameter)])
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    return optimizer, parameter


def _after_step(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> Mapping[str, torch.Tensor]:
    optimizer.step()
    tensors = {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}
    return {"parameter": parameter.detach(), **tensors}


def _role(optimizer: str, name: str, value: Any, parameter: torch.Tensor) -> Role:
    if not isinstance(value, torch.Tensor) or (value.shape != parameter.shape and value.numel() != 1):
        what = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
        raise TypeError(f"{optimizer} keeps {name!r} {what}: neither like the parameter nor a scalar tensor")
    return Role(name, value.shape == parameter.shape, value.dtype, value.device)
