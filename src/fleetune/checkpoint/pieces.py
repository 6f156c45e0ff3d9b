"""Pieces of a tensor: boxes with an offset and a shape, one number per dim. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape)"""


@dataclass(frozen=True)
class Overlap:
    """What two boxes share: where it starts in each of them, and its shape."""

    in_first: tuple[int, ...]
    in_second: tuple[int, ...]
    shape: tuple[int, ...]


def intersect(first: Box, second: Box) -> Overlap | None:
    """What two boxes of one tensor share, or None. Two boxes of a tensor without dims share its one element."""
    starts = [max(a, b) for a, b in zip(first[0], second[0])]
    ends = [min(a + m, b + n) for (a, m), (b, n) in zip(zip(*first), zip(*second))]
    if any(end <= start for start, end in zip(starts, ends)):
        return None
    return Overlap(
        tuple(start - a for start, a in zip(starts, first[0])),
        tuple(start - b for start, b in zip(starts, second[0])),
        tuple(end - start for start, end in zip(starts, ends)),
    )


def is_inside(global_shape: tuple[int, ...], box: Box) -> bool:
    """Whether a box has as many dims as the tensor and lies inside it."""
    offset, shape = box
    if len(offset) != len(global_shape) or len(shape) != len(global_shape):
        return False
    return all(start >= 0 and size >= 0 and start + size <= whole for start, size, whole in zip(offset, shape, global_shape))


def cover_fault(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover the whole tensor exactly once, in words; None where they do."""
    for offset, shape in boxes:
        if not is_inside(global_shape, (offset, shape)):
            return f"the piece at {list(offset)} of shape {list(shape)} is not inside the tensor"
    pair = next(_overlapping(global_shape, boxes), None)
    if pair is not None:
        one, other = (f"at {list(offset)} of shape {list(shape)}" for offset, shape in pair)
        return f"the pieces {one} and {other} overlap"
    # Boxes inside the tensor that share nothing cover it exactly when their elements add up.
    covered, whole = sum(math.prod(shape) for _, shape in boxes), math.prod(global_shape)
    if covered != whole or not boxes:
        return f"the pieces hold {covered} of the tensor's {whole} elements"
    return None


def _overlapping(global_shape: tuple[int, ...], boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs that overlap, by a sweep along the dim in which the boxes start at the most places.

    Pieces of one layout are cut along one dim, mostly: each is then compared with its neighbour alone.
    """
    boxes = [box for box in boxes if math.prod(box[1])]
    if not global_shape:
        yield from itertools.pairwise(boxes)
        return
    dim = max(range(len(global_shape)), key=lambda dim: len({offset[dim] for offset, _ in boxes}))
    ordered = sorted(boxes, key=lambda box: box[0][dim])
    active: list[Box] = []
    for box in ordered:
        active = [other for other in active if other[0][dim] + other[1][dim] > box[0][dim]]
        for other in active:
            if intersect(other, box) is not None:
                yield other, box
        active.append(box)
