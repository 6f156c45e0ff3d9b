"""Which piece of which parameter a rank keeps under tensor and full sharding: names, whole shapes and offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from fleetune.parallel.held import local


@dataclass(frozen=True)
class Cut:
    """How tensor parallelism cut a parameter. dim: which one, None where every tensor rank has all of it. start: where this
    rank's part begins. size: of the whole dim. partial: whether each tensor rank finds only its part of the gradient of a
    parameter that all have."""

    dim: int | None
    start: int = 0
    size: int = 0
    partial: bool = False


@dataclass(frozen=True)
class Piece:
    """A named parameter of this rank. tensor: its piece, plain, in the storage that the forward reads; perhaps empty.

    tensor_sharded: whether tensor peers hold other parts; where they do not, they hold the same.
    """

    name: str
    parameter: nn.Parameter
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    cut: Cut

    @property
    def tensor_sharded(self) -> bool:
        return self.cut.dim is not None

    def gradient(self) -> torch.Tensor | None:
        """This rank's piece of the gradient, plain."""
        return None if self.parameter.grad is None else local(self.parameter.grad)


@final
class Pieces:
    """All pieces of a sharded module, by its own order."""

    def __init__(self, module: nn.Module, cuts: Mapping[str, Cut], *, shard_ranks: int, shard_rank: int) -> None:
        self._all = [
            _piece(name, parameter, cuts.get(name, Cut(None)), shard_ranks, shard_rank)
            for name, parameter in module.named_parameters()
        ]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._all)

    def trained(self) -> list[Piece]:
        return [piece for piece in self._all if piece.parameter.requires_grad]


def _piece(name: str, parameter: nn.Parameter, cut: Cut, shard_ranks: int, shard_rank: int) -> Piece:
    """FSDP2 cuts the first dim into pieces of equal size, the last ones smaller or empty (torch.chunk)."""
    whole = list(parameter.shape)
    rows = whole[0]
    each = -(-rows // shard_ranks)
    offset = [0] * len(whole)
    offset[0] = min(each * shard_rank, rows)
    tensor = local(parameter).detach()
    expected = min(each, rows - offset[0])
    if tensor.shape[0] != expected:
        raise RuntimeError(f"{name} has {tensor.shape[0]} rows on shard rank {shard_rank}, expected were {expected}")
    if cut.dim is not None:
        whole[cut.dim] = cut.size
        offset[cut.dim] += cut.start
    return Piece(name, parameter, tensor, tuple(whole), tuple(offset), cut)


def put_in(pieces: Pieces, read: Any) -> None:
    """Give every parameter its first values: read(name, offset, shape) -> tensor on the CPU."""
    with torch.no_grad():
        for piece in pieces:
            if piece.tensor.numel():
                piece.tensor.copy_(read(piece.name, piece.offset, tuple(piece.tensor.shape)))
