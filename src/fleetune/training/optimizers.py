"""Optimizers over named parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NamedParameters = Iterable[tuple[str, "torch.nn.Parameter"]]


@dataclass(frozen=True)
class AdamWSettings:
    """Numbers of AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101). The learning rate comes with each step."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


def adamw(settings: AdamWSettings, *, is_decoupled: bool = True) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    """A factory of AdamW in two groups: matrices decay, biases and norms (fewer than 2 dims) never do.

    is_decoupled: weights decay beside the gradient (AdamW); else their decay is part of it (Adam with an L2 penalty).
    """

    def build(named: NamedParameters) -> torch.optim.Optimizer:
        import torch

        parameters = [parameter for _, parameter in named]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        return kind(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )

    return build


def adam(settings: AdamWSettings) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    """A factory of Adam (Kingma & Ba 2015), in the same two groups."""
    return adamw(settings, is_decoupled=False)


#: What `--optimizer` chooses from. On a CPU, cpu_adam is what adamw is.
OPTIMIZERS = {"adamw": adamw, "adam": adam, "cpu_adam": adamw}
