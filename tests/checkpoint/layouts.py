"""A small training state, cut into shards in many ways, and saved by several ranks at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fleetune.checkpoint.store import CheckpointStore, SaveReport
from fleetune.spec.records import Shard

Tensors = Mapping[tuple[str, str], torch.Tensor]
Box = tuple[tuple[int, ...], tuple[int, ...]]


def training_state(seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """(name, role) -> tensor of a tiny model with its optimizer: several dtypes, no dims, no elements."""
    generator = torch.Generator().manual_seed(seed)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        ("layers.0.weight", "parameter"): random_tensor(7, 5),
        ("layers.0.weight", "exp_avg"): random_tensor(7, 5),
        ("layers.0.weight", "exp_avg_sq"): random_tensor(7, 5).square(),
        ("layers.1.weight", "parameter"): random_tensor(6, 4).to(torch.bfloat16),
        ("experts", "parameter"): random_tensor(3, 4, 5).to(torch.float16),
        ("bias", "parameter"): random_tensor(9),
        ("step", "count"): torch.tensor(float(seed)),
        ("empty", "parameter"): torch.zeros(0, 4),
    }


def split(box: Box, num_parts: int, source: random.Random) -> list[Box]:
    """Cut a box along random dims into `num_parts` boxes at most (fewer where it has not the elements)."""
    boxes = [box]
    for _ in range(num_parts * 4):
        if len(boxes) >= num_parts:
            break
        offset, shape = boxes.pop(source.randrange(len(boxes)))
        dims = [dim for dim, size in enumerate(shape) if size > 1]
        if not dims:
            boxes.append((offset, shape))
            continue
        dim = source.choice(dims)
        at = source.randrange(1, shape[dim])
        for start, size in ((0, at), (at, shape[dim] - at)):
            boxes.append(((*offset[:dim], offset[dim] + start, *offset[dim + 1 :]), (*shape[:dim], size, *shape[dim + 1 :])))
    return boxes


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(*box))].contiguous()


def layout(tensors: Tensors, world_size: int, seed: int) -> list[list[Shard]]:
    """The shards of each rank in a random layout: every tensor in up to three pieces a rank, dealt out at random."""
    source = random.Random(seed)
    ranks: list[list[Shard]] = [[] for _ in range(world_size)]
    for (name, role), tensor in tensors.items():
        shape = tuple(tensor.shape)
        for box in split(((0,) * len(shape), shape), source.randrange(1, 2 + 2 * world_size), source):
            ranks[source.randrange(world_size)].append(Shard(name, role, shape, box[0], cut(tensor, box)))
    return ranks


def rows_of(tensors: Tensors, rank: int, world_size: int) -> Iterator[Shard]:
    """What a rank holds under a full shard: its rows of every tensor (the last ranks may have none)."""
    for (name, role), tensor in tensors.items():
        shape = tuple(tensor.shape)
        if not shape:
            if rank == 0:
                yield Shard(name, role, shape, (), tensor)
            continue
        each = -(-shape[0] // world_size)
        start = min(rank * each, shape[0])
        size = min(each, shape[0] - start)
        box = ((start, *(0,) * (len(shape) - 1)), (size, *shape[1:]))
        yield Shard(name, role, shape, box[0], cut(tensor, box))


def whole(tensors: Tensors) -> Iterator[Shard]:
    """Every tensor in one piece."""
    return rows_of(tensors, 0, 1)


def save_on_ranks(
    folder: Path,
    shards: Callable[[int], Any],
    *,
    world_size: int,
    step: int,
    state: Mapping[str, Any] | None = None,
    best: bool = False,
    **options: Any,
) -> list[SaveReport]:
    """One save by `world_size` ranks, each in a thread of its own, with a barrier that fails where a rank would hang."""
    barrier = threading.Barrier(world_size, timeout=20)
    reports: list[SaveReport | BaseException] = [RuntimeError("the rank did not end")] * world_size

    def one_rank(rank: int) -> None:
        try:
            store = CheckpointStore(folder, rank=rank, world_size=world_size, barrier=lambda: void(barrier.wait()), **options)
            reports[rank] = store.save(step, shards(rank), state or {"step": step}, best=best)
        except BaseException as error:
            barrier.abort()
            reports[rank] = error

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for report in reports:
        if isinstance(report, BaseException):
            raise report
    return [report for report in reports if isinstance(report, SaveReport)]


def void(_: object) -> None:
    """Drops a value where none is wanted."""


def same_tensors(checkpoint: Any, tensors: Tensors) -> bool:
    """Whether a checkpoint holds exactly these tensors, bit for bit."""
    if {(tensor.name, tensor.role) for tensor in checkpoint.tensors()} != set(tensors):
        return False
    for (name, role), tensor in tensors.items():
        found = checkpoint.read(name, role, (0,) * tensor.dim(), tuple(tensor.shape))
        if found.dtype != tensor.dtype or not torch.equal(found, tensor):
            return False
    return True
