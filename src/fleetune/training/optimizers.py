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


def adamw(settings: AdamWSettings) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    """A factory of AdamW in two groups: matrices decay, biases and norms (fewer than 2 dims) never do."""

    def build(named: NamedParameters) -> torch.optim.Optimizer:
        import torch

        parameters = [parameter for _, parameter in named]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )

    return build


#: What `--optimizer` chooses from.
OPTIMIZERS = {"adamw": adamw}
