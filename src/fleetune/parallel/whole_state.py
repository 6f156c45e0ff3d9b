"""Training state in whole tensors: how an engine whose ranks hold each tensor entire gives it out and takes it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from fleetune.parallel.optimizer_state import Role
from fleetune.spec.records import Shard, ShardReader

#: (name, role, tensor) of the training state, in the same order on every rank.
State = Iterable[tuple[str, str, torch.Tensor]]


def state_of(
    named: Iterable[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer, roles: Sequence[Role]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Each parameter, then what the optimizer keeps for it."""
    for name, parameter in named:
        yield name, "parameter", parameter
        state = optimizer.state[parameter]
        for role in roles:
            yield name, role.name, state[role.name]


def shards_of(state: State, *, rank: int, ranks: int) -> Iterator[Shard]:
    """Of what `ranks` hold alike, the part that `rank` writes: of all tensors in order, every so-many-th."""
    for number, (name, role, tensor) in enumerate(state):
        if number % ranks == rank:
            tensor = tensor.detach()
            tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
            yield Shard(name, role, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def fill(state: State, read: ShardReader) -> None:
    """Restore every tensor from a checkpoint of any layout. Raises KeyError for what it lacks."""
    with torch.no_grad():
        for name, role, tensor in state:
            shape = tuple(tensor.shape) or (1,)
            tensor.copy_(read(name, role, (0,) * len(shape), shape).reshape(tensor.shape))
