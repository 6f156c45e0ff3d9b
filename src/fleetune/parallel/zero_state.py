"""Where DeepSpeed keeps what is trained, stage by stage, and how it goes in and out: each rank its own piece, one parameter at
a time, through the attributes and functions that `deepspeed.utils` is made of; never through its checkpoints.

Each rank holds a run of every flattened parameter (or nothing of it), with the same run of the optimizer's moments. The
moments are made before the first step, as zeros, so that they are in every checkpoint and can be loaded into a fresh engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, final

import torch
from torch import nn

from fleetune.parallel.boxes import boxes_of
from fleetune.spec.records import Shard, ShardReader

Named = tuple[tuple[str, nn.Parameter], ...]

PARAMETER, STEP = "parameter", "step"
#: AdamW's state beside its count of steps, by torch's names, which DeepSpeed's own AdamW has too.
MOMENTS = ("exp_avg", "exp_avg_sq")


class Holding(Protocol):
    """How one stage keeps trained parameters on a rank."""

    def flats(self) -> Sequence[torch.Tensor]:
        """The tensors that the optimizer updates, fp32."""

    def run(self, parameter: nn.Parameter) -> tuple[int, int]:
        """(start, stop) of the elements of the flattened parameter that this rank holds; (0, 0) for none."""

    def piece(self, parameter: nn.Parameter, role: str) -> torch.Tensor:
        """fp32 [stop - start]: a view of the parameter's values or of one of its moments, as the optimizer has them."""

    def refresh(self, parameter: nn.Parameter, read: ShardReader, name: str) -> None:
        """After the piece was set: make what the forward uses agree with it. All ranks."""

    def loaded(self) -> None:
        """After every parameter was refreshed. All ranks."""


@final
class Whole:
    """Stage 0: everything on every rank; of the pieces, each rank hands on every world-size-th parameter."""

    def __init__(self, named: Named, optimizer: torch.optim.Optimizer, *, rank: int, world_size: int) -> None:
        self._state = optimizer.state
        self._parameters = [parameter for _, parameter in named]
        self._own = {id(parameter) for number, (_, parameter) in enumerate(named) if number % world_size == rank}

    def flats(self) -> Sequence[torch.Tensor]:
        return self._parameters

    def run(self, parameter: nn.Parameter) -> tuple[int, int]:
        return (0, parameter.numel()) if id(parameter) in self._own else (0, 0)

    def piece(self, parameter: nn.Parameter, role: str) -> torch.Tensor:
        return (parameter.detach() if role == PARAMETER else self._state[parameter][role]).view(-1)

    def refresh(self, parameter: nn.Parameter, read: ShardReader, name: str) -> None:
        for role in (PARAMETER, *MOMENTS):
            _fill(self.piece(parameter, role), (0, parameter.numel()), tuple(parameter.shape), read, name, role)

    def loaded(self) -> None:
        pass


@final
class Split:
    """Stages 1 and 2: the forward's parameters whole on every rank, an fp32 copy and the moments of a run of them here."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def flats(self) -> Sequence[torch.Tensor]:
        flats: Sequence[torch.Tensor] = self._optimizer.single_partition_of_fp32_groups
        return flats

    def run(self, parameter: nn.Parameter) -> tuple[int, int]:
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return 0, 0
        at = mapping.lp_fragment_address
        return at.start, at.start + at.numel

    def piece(self, parameter: nn.Parameter, role: str) -> torch.Tensor:
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        piece: torch.Tensor = mapping.get_hp_fragment(None if role == PARAMETER else role)
        return piece

    def refresh(self, parameter: nn.Parameter, read: ShardReader, name: str) -> None:
        whole = read(name, PARAMETER, (0,) * parameter.ndim, tuple(parameter.shape))
        parameter.data.copy_(whole)

    def loaded(self) -> None:
        pass


@final
class Pieces:
    """Stage 3: a run of each parameter, of its fp32 values and of its moments here; whole only while it computes."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def flats(self) -> Sequence[torch.Tensor]:
        flats: Sequence[torch.Tensor] = self._optimizer.fp32_partitioned_groups_flat
        return flats

    def run(self, parameter: nn.Parameter) -> tuple[int, int]:
        of: Any = parameter
        size = of.ds_tensor.ds_numel
        start = min(of.ds_numel, of.ds_zero_partition_rank * size)
        return start, min(of.ds_numel, start + size)

    def piece(self, parameter: nn.Parameter, role: str) -> torch.Tensor:
        start, stop = self.run(parameter)
        held, _ = self._optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=True, optim_state_key=None if role == PARAMETER else role
        )
        piece: torch.Tensor = held.narrow(0, 0, stop - start)
        return piece

    def refresh(self, parameter: nn.Parameter, read: ShardReader, name: str) -> None:
        of: Any = parameter
        start, stop = self.run(parameter)
        of.ds_tensor.data.narrow(0, 0, stop - start).copy_(self.piece(parameter, PARAMETER))

    def loaded(self) -> None:
        """Small parameters are whole on every rank between the steps: they are put together anew."""
        self._optimizer._partition_all_parameters()
        persistent = self._optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


def fill_moments(holding: Holding, optimizer: torch.optim.Optimizer, step: Any) -> None:
    """Give the optimizer its state, all zeros. step: what its count of steps begins with."""
    for flat in holding.flats():
        moments = {name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS}
        optimizer.state[flat] = {STEP: step.clone() if isinstance(step, torch.Tensor) else step, **moments}


def shards_of(
    named: Named, holding: Holding, optimizer: torch.optim.Optimizer, *, rank: int, world_size: int
) -> Iterator[Shard]:
    """This rank's pieces of everything; the count of steps goes with each parameter, as torch's optimizers keep it."""
    steps = torch.tensor([float(optimizer.state[holding.flats()[0]][STEP])], dtype=torch.float32)
    for number, (name, parameter) in enumerate(named):
        shape = shape_of(parameter)
        start, stop = holding.run(parameter)
        for role in (PARAMETER, *MOMENTS) if stop > start else ():
            piece = holding.piece(parameter, role).detach()
            at = 0
            for offset, part in boxes_of(shape, start, stop):
                count = torch.Size(part).numel()
                yield Shard(name, role, shape, offset, piece[at : at + count].view(part))
                at += count
        if number % world_size == rank:
            yield Shard(name, STEP, (1,), (0,), steps)


def load_into(named: Named, holding: Holding, optimizer: torch.optim.Optimizer, read: ShardReader) -> None:
    """Restore everything. All ranks. Raises KeyError for what the checkpoint lacks, ValueError where parameters have made
    different numbers of steps: here one count is kept for all."""
    counts = set()
    with torch.no_grad():
        for name, parameter in named:
            run, shape = holding.run(parameter), shape_of(parameter)
            for role in (PARAMETER, *MOMENTS) if run[1] > run[0] else ():
                _fill(holding.piece(parameter, role), run, shape, read, name, role)
            holding.refresh(parameter, read, name)
            counts.add(float(read(name, STEP, (0,), (1,))[0]))
        holding.loaded()
    if len(counts) > 1:
        raise ValueError(f"the checkpoint's parameters have made different numbers of steps ({sorted(counts)})")
    (count,) = counts
    for flat in holding.flats():
        known = optimizer.state[flat][STEP]
        optimizer.state[flat][STEP] = torch.full_like(known, count) if isinstance(known, torch.Tensor) else int(count)


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The parameter's shape as a layer, whole or in pieces; a scalar's is (1,)."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape)) or (1,)


def _fill(piece: torch.Tensor, run: tuple[int, int], shape: tuple[int, ...], read: ShardReader, name: str, role: str) -> None:
    at = 0
    for offset, part in boxes_of(shape, *run):
        count = torch.Size(part).numel()
        piece[at : at + count].copy_(read(name, role, offset, part).reshape(-1))
        at += count
