"""Runs of a flattened tensor as boxes of the tensor: what a rank holds is a run, and a checkpoint knows boxes. Arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape), one number per dim"""


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements start ≤ i < stop of a flattened tensor, in order, as boxes: at most 2 × dims - 1 of them."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = prod(shape[1:])
    row, into = divmod(start, inner)
    if into or stop - start < inner:
        end = min(stop, (row + 1) * inner)
        for offset, part in boxes_of(shape[1:], into, end - row * inner):
            yield (row, *offset), (1, *part)
        yield from boxes_of(shape, end, stop)
        return
    rows = (stop - start) // inner
    yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from boxes_of(shape, start + rows * inner, stop)
