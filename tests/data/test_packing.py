from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetune.data.packing import best_fit


@given(capacity=st.integers(1, 300), data=st.data())
def test_every_item_is_in_one_bin_and_no_bin_is_over_full(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=200))
    bins = best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in items) <= capacity for items in bins)


@given(capacity=st.integers(2, 60), data=st.data())
def test_it_is_within_the_bound_of_best_fit_decreasing(capacity: int, data: st.DataObject) -> None:
    """Bins that are known to be full are cut into items: the optimum is known, 11/9 of it plus four the bound (Johnson)."""
    optimum = data.draw(st.integers(1, 30))
    lengths: list[int] = []
    for _ in range(optimum):
        left = capacity
        while left:
            lengths.append(data.draw(st.integers(1, left)))
            left -= lengths[-1]
    assert optimum <= len(best_fit(np.array(lengths), capacity)) <= math.floor(11 / 9 * optimum + 4)


def test_a_block_of_real_looking_lengths_is_packed_nearly_full_and_the_same_each_time() -> None:
    lengths = np.random.default_rng(0).gamma(2.0, 110.0, 65_536).astype(np.int64).clip(8, 1024)
    bins = best_fit(lengths, 1024)
    assert lengths.sum() / (1024 * len(bins)) > 0.99
    assert bins == best_fit(lengths, 1024)


def test_an_item_that_no_bin_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="length 9"):
        best_fit(np.array([3, 9]), 8)
