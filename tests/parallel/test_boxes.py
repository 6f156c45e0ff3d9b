"""Runs of a flattened tensor as boxes: in order, each element once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetune.parallel.boxes import boxes_of


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_run_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel())
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = list(boxes_of(tuple(shape), start, stop))
    found = [
        whole.view(shape)[tuple(slice(at, at + size) for at, size in zip(offset, part))].flatten() for offset, part in boxes
    ]
    assert torch.equal(torch.cat([torch.empty(0, dtype=whole.dtype), *found]), whole[start:stop])
    assert len(boxes) <= 2 * len(shape) - 1
