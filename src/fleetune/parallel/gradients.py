"""All trainable gradients in one flat buffer, so that one all-reduce a step carries them, always in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

#: Elements of a block: gradients begin on multiples of 16 (64 bytes, a cache line), the norm is taken block by block.
_ALIGNMENT = 16
_BLOCK = 4096
#: The mean loss per token is cut at this many binary digits after the point; see `put_loss`.
_COARSE = 65536.0


@final
class FlatGradients:
    """An fp32 buffer whose pieces are the parameters' `.grad`; backward passes add into it.

    Behind the gradients the loss travels with the same all-reduce. named: every trainable parameter once, fp32, all on one
    device. Raises TypeError for another dtype, ValueError for a parameter that comes twice or lies elsewhere.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        _check(named)
        starts, end = [], 0
        for _, parameter in named:
            starts.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        self._end = -(-end // _BLOCK) * _BLOCK
        device = named[0][1].device
        self.buffer = torch.zeros(self._end + _ALIGNMENT, dtype=torch.float32, device=device)
        self._pieces = [
            (name, parameter, self.buffer[start : start + parameter.numel()].view_as(parameter))
            for start, (name, parameter) in zip(starts, named)
        ]
        for _, parameter, piece in self._pieces:
            parameter.grad = piece

    def zero(self) -> None:
        """Begin a step. Raises RuntimeError where a parameter's gradient is no longer a piece of the buffer."""
        self.buffer.zero_()
        for name, parameter, piece in self._pieces:
            if parameter.grad is not piece:
                raise RuntimeError(f"the gradient of {name} was replaced by somebody: it would not be summed over the ranks")

    def put_loss(self, loss: torch.Tensor) -> None:
        """Lay this rank's part of the mean loss (float64 scalar) behind the gradients, for the sum over ranks.

        As two fp32 numbers: one cut to 16 binary digits after the point, whose sum over ranks is exact as long as the loss
        is below 256, and the rest. The sum is then as good as one in double precision.
        """
        coarse = torch.round(loss * _COARSE) / _COARSE
        self.buffer[self._end] = coarse
        self.buffer[self._end + 1] = loss - coarse

    def loss_and_norm(self) -> tuple[float, float]:
        """(loss, L2 norm of the whole gradient) of what is in the buffer. One wait for the device."""
        blocks = torch.linalg.vector_norm(self.buffer[: self._end].view(-1, _BLOCK), dim=1)
        norm = torch.linalg.vector_norm(blocks.double())
        loss, rest = self.buffer[self._end].double(), self.buffer[self._end + 1].double()
        both: list[float] = torch.stack([loss + rest, norm]).tolist()
        return both[0], both[1]

    def multiply(self, factor: float) -> None:
        """Scale all gradients."""
        if factor != 1.0:
            self.buffer[: self._end].mul_(factor)

    def detach(self) -> None:
        """Give the parameters back without gradients."""
        for _, parameter, _ in self._pieces:
            parameter.grad = None
        self._pieces.clear()


def _check(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    if not named:
        raise ValueError("the model has no trainable parameter")
    seen: dict[int, str] = {}
    device = named[0][1].device
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise TypeError(f"trainable parameter {name} is {parameter.dtype}: what is trained must be torch.float32")
        if not parameter.is_contiguous():
            raise ValueError(f"trainable parameter {name} is not contiguous")
        if parameter.device != device:
            raise ValueError(f"trainable parameter {name} is on {parameter.device}, {named[0][0]} on {device}")
        if id(parameter) in seen:
            raise ValueError(f"{seen[id(parameter)]} and {name} are one parameter: give it once")
        seen[id(parameter)] = name
