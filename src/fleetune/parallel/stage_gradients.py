"""The gradients of one stage, and what stages that hold the same weights owe each other.

A weight may lie on several stages: an embedding that is also the head, and the few weights outside the blocks. Each of
them takes part with what its own forward gave; the sum is every holder's gradient, so all make the same update and stay
equal to the last bit. The first holder owns the weight: it is counted, saved and told there, and only there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
import torch.distributed as dist

from fleetune.parallel.gradients import FlatGradients
from fleetune.spec.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fleetune.parallel.world import World
    from fleetune.spec.layout import Layout

NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass(frozen=True)
class Holders:
    """Which stages hold each trained weight: name -> numbers of stages, the owner first. The same on every rank."""

    by_name: dict[str, tuple[int, ...]]

    @staticmethod
    def gather(world: World, names: Sequence[str]) -> Holders:
        """names: what this rank holds. All ranks. Raises UserError where a stage trains nothing."""
        told = world.gather_json(list(names))
        found: dict[str, list[int]] = defaultdict(list)
        for rank, held in enumerate(told):
            at = world.layout.coordinates(rank)
            if (at.replicate, at.shard, at.tensor) == (0, 0, 0):
                if not held:
                    raise UserError(
                        f"nothing is trained in stage {at.pipeline + 1} of {world.layout.pipeline}, so it would only pass "
                        "hidden states on: give fewer stages with --pipeline, or --lora-targets in all blocks"
                    )
                for name in held:
                    found[name].append(at.pipeline)
        return Holders({name: tuple(stages) for name, stages in found.items()})

    def owner(self, name: str) -> int:
        return self.by_name[name][0]

    def shared(self) -> list[tuple[int, ...]]:
        """The sets of stages that hold a weight together, in a fixed order."""
        return sorted({stages for stages in self.by_name.values() if len(stages) > 1})


@final
class StageGradients:
    """fp32 gradients of the weights of one stage: those that it owns, and those that it holds with an earlier one.

    named: what this rank trains. data_group: the ranks with the same stage; None where there is one.
    """

    def __init__(self, named: NamedParameters, holders: Holders, *, world: World, data_group: ProcessGroup | None) -> None:
        stage = world.coordinates.pipeline
        self._world, self._data_group = world, data_group
        own = [(name, parameter) for name, parameter in named if holders.owner(name) == stage]
        others = [(name, parameter) for name, parameter in named if holders.owner(name) != stage]
        self._own = FlatGradients(own)
        self._parts = [self._own] + ([FlatGradients(others)] if others else [])
        self._shared = [
            (group, [parameter for name, parameter in named if holders.by_name[name] == stages])
            for stages, group in _groups(world, holders).items()
            if stage in stages
        ]

    def zero(self) -> None:
        for part in self._parts:
            part.zero()

    def reduce(self) -> None:
        """Sum over the data ranks, then over the stages that hold a weight together. All ranks.

        In this order: every data rank then adds the same numbers, so that no copy drifts from another.
        """
        if self._data_group is not None:
            for part in self._parts:
                self._sum(part.buffer, self._data_group)
        for group, parameters in self._shared:
            pieces = [parameter.grad for parameter in parameters if parameter.grad is not None]
            joined = torch.cat([piece.reshape(-1) for piece in pieces])
            self._sum(joined, group)
            for piece, summed in zip(pieces, joined.split([piece.numel() for piece in pieces])):
                piece.copy_(summed.view_as(piece))

    def norm(self) -> float:
        """L2 norm of the gradients that this stage owns."""
        return self._own.loss_and_norm()[1]

    def multiply(self, factor: float) -> None:
        for part in self._parts:
            part.multiply(factor)

    def detach(self) -> None:
        for part in self._parts:
            part.detach()

    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> None:
        self._world.bytes_sent += tensor.numel() * tensor.element_size()
        dist.all_reduce(tensor, group=group)


def ranks_with(layout: Layout, rank: int, stages: Sequence[int]) -> list[int]:
    """The ranks that stand where `rank` does but for the stage, in the order of `stages`."""
    at = layout.coordinates(rank)
    each = layout.world_size // layout.pipeline
    return [rank + (stage - at.pipeline) * each for stage in stages]


def _groups(world: World, holders: Holders) -> dict[tuple[int, ...], ProcessGroup]:
    """A group for each set of stages that hold weights together, in which this rank's data share is; all ranks ask for all."""
    layout, found = world.layout, {}
    for stages in holders.shared():
        for first in range(layout.world_size // layout.pipeline):
            ranks = ranks_with(layout, first, stages)
            group = dist.new_group(ranks)
            if world.rank in ranks:
                found[stages] = group
    return found
