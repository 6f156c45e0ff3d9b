"""Which documents share a sequence: best fit, the longest first. Pure, and the same for the same lengths."""

from __future__ import annotations

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Put items of `lengths` (int [N], each 1..capacity) into as few bins of `capacity` as best-fit decreasing finds.

    Returns the item numbers of each bin. Each item goes into the fullest bin that still holds it; ties go to the earlier
    item. Close to linear time: the free rooms are the set bits of one integer, so that the smallest that is large enough
    is found by a shift (Johnson 1973 bounds the bins at 11/9 of the optimum plus four).
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    sizes = np.asarray(lengths).tolist()
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0
    for item in order:
        size = sizes[item]
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            waiting = with_room[room]
            number = waiting.pop()
            if not waiting:
                rooms &= ~(1 << room)
            bins[number].append(item)
        else:
            if not 0 < size <= capacity:
                raise ValueError(f"item {item} has length {size}, which a bin of {capacity} does not hold")
            room, number = capacity, len(bins)
            bins.append([item])
        left = room - size
        if left:
            with_room.setdefault(left, []).append(number)
            rooms |= 1 << left
    return bins
