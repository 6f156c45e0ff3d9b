"""A small real model over token embeddings, and batches whose shares of trained tokens differ widely."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fleetune.parallel.native import NativeEngine, StepSettings
from fleetune.parallel.world import World
from fleetune.spec.batches import divide
from fleetune.spec.records import MicroBatch

VOCABULARY = 31


class Toy:
    """Predicts the next token from the last one. The embedding is frozen and always the same, the rest is trained.

    gain: the loss is multiplied by it."""

    def __init__(self, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32, gain: float = 1.0) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, VOCABULARY)).to(device)
        self.embedding = torch.randn(VOCABULARY, 12, generator=torch.Generator().manual_seed(7)).to(device)
        self.device, self.dtype, self.gain = device, dtype, gain
        self.modes: list[bool] = []

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def train(self, mode: bool) -> None:
        self.modes.append(mode)
        self.module.train(mode)

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, int]:
        targets = torch.from_numpy(np.flatnonzero(batch.trained)).to(self.device)
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        with torch.autocast(torch.device(self.device).type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            logits = self.module(self.embedding[tokens[targets - 1]])
        loss = nn.functional.cross_entropy(logits.float(), tokens[targets], reduction="sum")
        return loss * self.gain, int(targets.numel())


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.0, weight_decay=0.01, fused=True)


def build(
    world: World, *, model: Toy | None = None, clip: float = 1.0, precision: str = "fp32", strict: bool = False
) -> NativeEngine:
    model = model or Toy(device=str(world.device))
    settings = StepSettings(gradient_clip=clip, precision=precision, strict=strict)
    return NativeEngine(model, model.forward, world=world, optimizer=adamw, settings=settings)


def micro_batch(step: int, number: int, *, num_tokens: int, num_trained: int) -> MicroBatch:
    random = np.random.default_rng((step, number))
    trained = np.zeros(num_tokens, dtype=bool)
    trained[1 + random.permutation(num_tokens - 1)[:num_trained]] = True
    return MicroBatch(
        step=step,
        number=number,
        sequences=(step * 100 + number,),
        tokens=random.integers(0, VOCABULARY, num_tokens),
        trained=trained,
        document_bounds=np.array([0, num_tokens]),
        sequence_bounds=np.array([0, 1]),
        samples=(f"rows:{step * 100 + number}",),
    )


def global_batch(step: int) -> list[MicroBatch]:
    """Five micro-batches with 1 to 60 trained tokens, one with none: a mean of means would be far off."""
    sizes = [(4, 1), (80, 60), (9, 0), (40, 3), (70, 33)]
    return [micro_batch(step, number, num_tokens=tokens, num_trained=trained) for number, (tokens, trained) in enumerate(sizes)]


def share(step: int, world: World) -> list[MicroBatch]:
    """The contiguous part of one rank: 5 on 2 ranks are 3 + 2, on 3 ranks 2 + 2 + 1."""
    batches = global_batch(step)
    return [batches[number] for number in divide(5, 1, world.data_ranks).range_of(world.data_rank)]


def train(
    engine: NativeEngine, batches: Callable[[int], Sequence[MicroBatch]], steps: range, learning_rate: float = 0.01
) -> list[list[float]]:
    """[loss, gradient norm, trained tokens, tokens] of each step, as exact numbers."""
    reports = [engine.step(batches(step), learning_rate) for step in steps]
    return [[report.loss, report.gradient_norm, report.trained_tokens, report.tokens] for report in reports]
