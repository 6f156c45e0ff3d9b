"""A sum over the micro-batches of a step that does not depend on which rank had which: the same bits for any number of ranks.

Additions of floating point numbers are done in one order, that of a binary tree over the numbers of the micro-batches: first
0 + 1, 2 + 3, ..., then (0 + 1) + (2 + 3), ... Each rank adds up what lies whole within its own run of micro-batches; these
partial sums, at most two for each level of the tree, are cut into as many pieces as there are ranks and exchanged, so that
each rank finishes the tree for its piece; then everybody gets all pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch
import torch.distributed as dist

from fleetune.parallel.world import World

#: (number of its first micro-batch, how many it spans: a power of two that divides the number)
Node = tuple[int, int]


def combine(nodes: Mapping[Node, torch.Tensor], count: int) -> torch.Tensor:
    """The sum over micro-batches 0 to count - 1 by the tree. nodes: partial sums that cover them, each once; they may be
    overwritten. Raises ValueError where a micro-batch is missing."""
    width = 1
    while width < count:
        width *= 2
    found = _sum(nodes, (0, width), count)
    if found is None:
        raise ValueError("a step has at least one micro-batch")
    return found


def _sum(nodes: Mapping[Node, torch.Tensor], node: Node, count: int) -> torch.Tensor | None:
    """The sum below a node of the tree; None where it lies behind the last micro-batch."""
    start, width = node
    if start >= count:
        return None
    if node in nodes:
        return nodes[node]
    if width == 1:
        raise ValueError(f"micro-batch {start} of {count} belongs to no rank")
    half = width // 2
    left, right = _sum(nodes, (start, half), count), _sum(nodes, (start + half, half), count)
    assert left is not None
    return left if right is None else left.add_(right)


@final
class OrderedSum:
    """Sums one flat fp32 buffer over the micro-batches of all ranks. Every rank calls `reduce` for each step.

    It keeps a copy of the buffer for each level of the tree, and once more for what is sent.
    """

    def __init__(self, buffer: torch.Tensor, world: World) -> None:
        self._buffer, self._world = buffer, world
        #: Elements of a piece: the last one is filled up.
        self._piece = -(-buffer.numel() // world.world_size)
        self._spare: list[torch.Tensor] = []
        self._nodes: list[tuple[Node, torch.Tensor]] = []

    def reduce(self, numbers: Iterable[int]) -> None:
        """Replace the buffer by the sum over all micro-batches of all ranks.

        numbers: of this rank's micro-batches, consecutive; each comes when its values lie in the buffer, which is zeroed then.
        """
        self._spare += [tensor for _, tensor in self._nodes]
        self._nodes.clear()
        for number in numbers:
            self._push((number, 1))
        nodes = dict(self._nodes) if self._world.world_size == 1 else self._exchange()
        count = max(start + width for start, width in nodes)
        total = combine(nodes, count)
        if self._world.world_size > 1:
            total = self._all_pieces(total)
        self._buffer.copy_(total[: self._buffer.numel()])

    def _push(self, node: Node) -> None:
        """Take the buffer's values as a leaf of the tree, and add up what has become whole."""
        tensor = self._spare.pop() if self._spare else self._buffer.new_zeros(self._piece * self._world.world_size)
        tensor[: self._buffer.numel()].copy_(self._buffer)
        self._buffer.zero_()
        while self._nodes:
            (start, width), before = self._nodes[-1]
            if width != node[1] or start + width != node[0] or start % (2 * width):
                break
            self._nodes.pop()
            self._spare.append(tensor)
            tensor, node = before.add_(tensor), (start, 2 * width)
        self._nodes.append((node, tensor))

    def _exchange(self) -> dict[Node, torch.Tensor]:
        """This rank's piece of every partial sum of all ranks."""
        world, piece = self._world, self._piece
        mine = [node for node, _ in self._nodes]
        everybody: list[list[Node]] = [[(start, width) for start, width in nodes] for nodes in world.gather_json(mine)]
        sent = self._buffer.new_empty(world.world_size, len(mine), piece)
        for index, (_, tensor) in enumerate(self._nodes):
            sent[:, index].copy_(tensor.view(world.world_size, piece))
        received = self._buffer.new_empty(sum(map(len, everybody)) * piece)
        dist.all_to_all_single(
            received,
            sent.view(-1),
            output_split_sizes=[len(nodes) * piece for nodes in everybody],
            input_split_sizes=[len(mine) * piece] * world.world_size,
        )
        world.bytes_sent += sent.numel() * sent.element_size()
        pieces = received.view(-1, piece)
        return {node: pieces[index] for index, node in enumerate(node for nodes in everybody for node in nodes)}

    def _all_pieces(self, mine: torch.Tensor) -> torch.Tensor:
        world = self._world
        pieces = [torch.empty_like(mine) for _ in range(world.world_size)]
        dist.all_gather(pieces, mine)
        world.bytes_sent += mine.numel() * mine.element_size()
        return torch.cat(pieces)
