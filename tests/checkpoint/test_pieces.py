from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.layouts import split
from fleetune.checkpoint.pieces import Box, cover_fault, intersect

SHAPES = st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple)
FULL_SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, start + size) for start, size in zip(*box))))


@given(SHAPES, st.integers(1, 8), st.integers(0, 1000))
def test_pieces_cut_from_a_tensor_cover_it_exactly_once(shape: tuple[int, ...], parts: int, seed: int) -> None:
    boxes = split(((0,) * len(shape), shape), parts, random.Random(seed))
    assert cover_fault(shape, boxes) is None


@given(FULL_SHAPES, st.integers(1, 8), st.integers(0, 1000))
def test_a_lost_a_doubled_and_a_shifted_piece_are_each_found(shape: tuple[int, ...], parts: int, seed: int) -> None:
    source = random.Random(seed)
    boxes = split(((0,) * len(shape), shape), parts, source)
    victim = source.randrange(len(boxes))
    assert cover_fault(shape, boxes[:victim] + boxes[victim + 1 :]) is not None
    offset, size = boxes[victim]
    assert cover_fault(shape, [*boxes, boxes[victim]]) is not None
    if shape:
        dim = source.randrange(len(shape))
        shifted = ((*offset[:dim], offset[dim] + 1, *offset[dim + 1 :]), size)
        assert cover_fault(shape, [*boxes[:victim], shifted, *boxes[victim + 1 :]]) is not None


@settings(max_examples=300)
@given(st.integers(0, 3), st.data())
def test_what_two_boxes_share_is_what_sets_of_their_elements_share(num_dims: int, data: st.DataObject) -> None:
    numbers = st.tuples(*[st.integers(0, 5)] * num_dims)
    first, second = data.draw(st.tuples(numbers, numbers)), data.draw(st.tuples(numbers, numbers))
    shared = elements(first) & elements(second)
    overlap = intersect(first, second)
    if overlap is None:
        assert not shared
        return
    assert elements((tuple(a + b for a, b in zip(first[0], overlap.in_first)), overlap.shape)) == shared
    assert elements((tuple(a + b for a, b in zip(second[0], overlap.in_second)), overlap.shape)) == shared


def test_ten_thousand_rows_of_pieces_are_checked_at_once() -> None:
    boxes = [((row, 0), (1, 8)) for row in range(10_000)]
    assert cover_fault((10_000, 8), boxes) is None
    assert "overlap" in (cover_fault((10_000, 8), [*boxes, ((5_000, 3), (1, 1))]) or "")
