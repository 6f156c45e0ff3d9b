"""What one rank holds of the training state: the figures that show whether a layout is real."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Held:
    """parameter_bytes, optimizer_bytes: on this rank (the optimizer's moments, not its counters).

    trained_parameters: of the whole model. trained_here: those of them, or pieces of them, that this rank keeps.
    """

    parameter_bytes: int
    optimizer_bytes: int
    trained_parameters: int
    trained_here: int


def held_by(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> Held:
    """Of torch modules and optimizers, sharded or not. parameters: all of the model's, each once, frozen ones too."""
    parameters = list(parameters)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    moments = [value for state in optimizer.state.values() for value in state.values() if _is_moment(value)]
    return Held(
        parameter_bytes=sum(_bytes(parameter) for parameter in parameters),
        optimizer_bytes=sum(_bytes(moment) for moment in moments),
        trained_parameters=sum(parameter.numel() for parameter in trained),
        trained_here=sum(local(parameter).numel() for parameter in trained),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a sharded tensor; a plain one as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_moment(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _bytes(tensor: torch.Tensor) -> int:
    piece = local(tensor)
    return piece.numel() * piece.element_size()
