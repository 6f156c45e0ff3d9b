from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetune.data.permutation import Permutation, key_of


@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_every_position_has_another_value(size: int, key: int) -> None:
    values = Permutation(size, key)(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))


@given(size=st.integers(1, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_position_has_the_same_value_alone_and_among_others(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    permutation = Permutation(size, key)
    together = permutation(np.array(positions)).tolist()
    assert together == [int(permutation(np.array([position]))[0]) for position in positions]
    assert all(0 <= value < size for value in together)


def test_values_of_known_keys_never_change() -> None:
    """A resumed run counts on these numbers: a change would lose and repeat rows of every run that was ever started."""
    assert Permutation(10, key_of("epoch", 0, 0))(np.arange(10)).tolist() == [7, 4, 1, 0, 6, 3, 2, 9, 5, 8]
    assert key_of("epoch", 0, 1) == 12941003694784074988


def test_another_key_gives_another_order_that_looks_random() -> None:
    size = 10_000
    orders = [Permutation(size, key_of("epoch", 0, epoch))(np.arange(size)) for epoch in range(3)]
    for order in orders:
        correlation = np.corrcoef(order, np.arange(size))[0, 1]
        assert abs(correlation) < 0.05
        assert np.mean(np.abs(np.diff(order)) == 1) < 0.01
    assert np.mean(orders[0] == orders[1]) < 0.01
    assert np.mean(orders[1] == orders[2]) < 0.01


def test_a_position_outside_is_refused() -> None:
    with pytest.raises(IndexError, match=r"0\.\.2"):
        Permutation(3, 1)(np.array([3]))
