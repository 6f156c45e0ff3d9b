from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetune.data.plan import plan_run
from fleetune.spec.batches import num_steps

sizes = st.integers(1, 60)
batches = st.integers(1, 16)


@given(num_sequences=sizes, batch=batches, epochs=st.integers(1, 4), seed=st.integers(0, 2**63 - 1))
def test_each_epoch_reads_each_sequence_once(num_sequences: int, batch: int, epochs: int, seed: int) -> None:
    plan = plan_run(num_sequences, seed=seed, global_batch_size=batch, epochs=epochs)
    read = np.concatenate([plan.step(step) for step in range(plan.num_steps)])
    assert len(read) == epochs * num_sequences
    for epoch in range(epochs):
        part = read[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert sorted(part.tolist()) == list(range(num_sequences))


@given(num_sequences=sizes, batch=batches, epochs=st.floats(0.05, 3.0))
def test_only_the_last_step_is_short(num_sequences: int, batch: int, epochs: float) -> None:
    plan = plan_run(num_sequences, seed=1, global_batch_size=batch, epochs=epochs)
    lengths = [len(plan.step(step)) for step in range(plan.num_steps)]
    assert set(lengths[:-1]) <= {batch}
    assert 1 <= lengths[-1] <= batch
    assert plan.num_steps == num_steps(num_sequences, epochs, batch)
    assert epochs * num_sequences - 1e-6 <= sum(lengths) < epochs * num_sequences + 1


@given(num_sequences=sizes, batch=batches, seed=st.integers(0, 99), data=st.data())
def test_a_plan_resumed_twice_reads_what_the_uninterrupted_one_reads(
    num_sequences: int, batch: int, seed: int, data: st.DataObject
) -> None:
    whole = plan_run(num_sequences, seed=seed, global_batch_size=batch, epochs=3)
    first, second = sorted(data.draw(st.lists(st.integers(0, whole.num_steps - 1), min_size=2, max_size=2)))
    position = first_step = 0
    read: list[int] = []
    for stop in (first, second, whole.num_steps):
        plan = plan_run(
            num_sequences, seed=seed, global_batch_size=batch, epochs=3, first_step=first_step, first_position=position
        )
        assert plan.num_steps == whole.num_steps
        for step in range(first_step, stop):
            read += plan.step(step).tolist()
            position = plan.next_position(step)
        first_step = stop
    assert read == np.concatenate([whole.step(step) for step in range(whole.num_steps)]).tolist()


def test_max_steps_counts_full_steps_across_epochs() -> None:
    plan = plan_run(5, seed=0, global_batch_size=4, max_steps=10)
    steps = [plan.step(step) for step in range(10)]
    assert all(len(step) == 4 for step in steps)
    assert Counter(np.concatenate(steps).tolist()) == dict.fromkeys(range(5), 8)
    with pytest.raises(IndexError, match=r"0\.\.9"):
        plan.step(10)


def test_a_run_that_ended_with_a_short_step_can_be_given_more_epochs() -> None:
    short = plan_run(10, seed=0, global_batch_size=4, epochs=1)
    longer = plan_run(
        10, seed=0, global_batch_size=4, epochs=2, first_step=short.num_steps, first_position=short.next_position(2)
    )
    read = [short.step(step) for step in range(3)] + [longer.step(step) for step in range(3, longer.num_steps)]
    assert Counter(np.concatenate(read).tolist()) == dict.fromkeys(range(10), 2)


def test_nothing_is_left_of_a_run_that_is_done() -> None:
    plan = plan_run(10, seed=0, global_batch_size=4, epochs=1, first_step=3, first_position=10)
    assert plan.num_steps == 3


def test_seeds_and_epochs_have_their_own_orders() -> None:
    orders = [
        tuple(plan_run(40, seed=seed, global_batch_size=40, epochs=2).step(epoch).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_an_order_that_is_given_holds_in_every_epoch() -> None:
    order = np.array([3, 1, 0, 2])
    plan = plan_run(4, seed=0, global_batch_size=3, epochs=2, order=order)
    read = [int(sequence) for step in range(plan.num_steps) for sequence in plan.step(step)]
    assert read == [3, 1, 0, 2, 3, 1, 0, 2]


def test_a_far_step_is_found_without_walking_there() -> None:
    plan = plan_run(10**9, seed=3, global_batch_size=8, epochs=50)
    found = plan.step(plan.num_steps - 1)
    assert len(found) == 8
    assert len(set(found.tolist())) == 8
