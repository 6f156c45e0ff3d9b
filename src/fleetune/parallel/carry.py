"""What single ranks hand to each other: values with tensors, over gloo on the CPU and without pickles."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fleetune.parallel.world import World, as_bytes, decode, encode


def broadcast_bytes(world: World, data: torch.Tensor) -> None:
    """Fill `data`, uint8 [N] on the CPU, with rank 0's. All ranks."""
    if world.world_size > 1:
        if world.rank == 0:
            world.bytes_sent += data.numel()
        dist.broadcast(data, src=0)


def send(world: World, header: Any, tensor: torch.Tensor | None, to: int) -> None:
    """Give one rank a JSON value and a tensor's bytes; that rank calls `receive` at the same time."""
    message = as_bytes(encode(header))
    body = torch.empty(0, dtype=torch.uint8)
    if tensor is not None and tensor.numel():
        body = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    sizes = torch.tensor([message.numel(), body.numel()])
    for part in (sizes, message, body):
        if part.numel():
            world.bytes_sent += part.numel() * part.element_size()
            dist.send(part, to)


def receive(source: int) -> tuple[Any, torch.Tensor]:
    """(the value, uint8 [N] on the CPU) that a rank sends."""
    sizes = torch.empty(2, dtype=torch.int64)
    dist.recv(sizes, source)
    message, body = (torch.empty(size, dtype=torch.uint8) for size in sizes.tolist())
    for part in (message, body):
        if part.numel():
            dist.recv(part, source)
    return decode(message), body


def barrier_of(num_ranks: int) -> Callable[[], None]:
    """A barrier of the first `num_ranks` ranks alone. All ranks make it; only those call what is returned."""
    group = dist.new_group(list(range(num_ranks)), backend="gloo")

    def barrier() -> None:
        dist.all_reduce(torch.zeros(1), group=group)

    return barrier


def barrier_aside(world: World) -> Callable[[], None]:
    """A barrier for one other thread of each rank, which nothing in the ranks' main threads gets in the way of. All ranks.

    It waits for up to 6 hours (a slow disk), and raises RuntimeError where a peer dies.
    """
    if world.world_size == 1:
        return lambda: None
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
    return lambda: dist.all_reduce(torch.zeros(1), group=group)
