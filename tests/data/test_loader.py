from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fleetune.data.loader import Loader, evaluation_batches
from fleetune.data.plan import SamplePlan, plan_run
from fleetune.data.store import TokenStore
from fleetune.spec.batches import divide
from fleetune.spec.records import StepBatch

MakeStore = Callable[..., TokenStore]


def load(store: TokenStore, plan: SamplePlan, rank: int, ranks: int, micro: int = 1, **options: Any) -> list[StepBatch]:
    with Loader(store, plan, divide(plan.global_batch_size, micro, ranks), rank, **options) as loader:
        return list(loader)


def plain(batches: list[StepBatch]) -> list[Any]:
    """What a rank computes on, without the clock."""
    return [
        (
            batch.step,
            batch.samples,
            batch.next_sequence,
            [
                [value.tolist() if isinstance(value, np.ndarray) else value for value in vars(m).values()]
                for m in batch.micro_batches
            ],
        )
        for batch in batches
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_number_of_rows_is_read_once_an_epoch_by_any_world(make_store: MakeStore, ranks: int, num_workers: int) -> None:
    for num_rows in range(1, 2 * ranks + 2):
        store = make_store([5 + row for row in range(num_rows)], packing=False)
        plan = plan_run(store.num_sequences, seed=0, global_batch_size=4, epochs=2)
        by_rank = [load(store, plan, rank, ranks, micro=2, num_workers=num_workers) for rank in range(ranks)]
        rows = Counter(sample for batches in by_rank for batch in batches for m in batch.micro_batches for sample in m.samples)
        assert rows == {f"f0:{row}": 2 for row in range(1, num_rows + 1)}
        assert all(len(batches) == plan.num_steps for batches in by_rank)


def test_a_step_is_the_same_micro_batches_for_every_world(make_store: MakeStore) -> None:
    store = make_store([3 + row % 9 for row in range(50)])
    plan = plan_run(store.num_sequences, seed=0, global_batch_size=7, epochs=1.5)

    def steps(ranks: int) -> list[Any]:
        by_rank = [plain(load(store, plan, rank, ranks, micro=2)) for rank in range(ranks)]
        assert all([batch[:3] for batch in batches] == [batch[:3] for batch in by_rank[0]] for batches in by_rank)
        return [[m for batches in by_rank for m in batches[step][3]] for step in range(plan.num_steps)]

    assert steps(1) == steps(2) == steps(3) == steps(4)


def test_ids_of_the_whole_step_are_in_order_on_every_rank(make_store: MakeStore) -> None:
    store = make_store([6] * 12, packing=False)
    plan = plan_run(12, seed=0, global_batch_size=4, epochs=1)
    by_rank = [load(store, plan, rank, 3) for rank in range(3)]
    for batches in zip(*by_rank):
        own = tuple(sample for batch in batches for m in batch.micro_batches for sample in m.samples)
        assert {batch.samples for batch in batches} == {own}


def test_reading_ahead_changes_nothing(make_store: MakeStore) -> None:
    store = make_store([3 + row % 9 for row in range(40)])
    plan = plan_run(store.num_sequences, seed=5, global_batch_size=4, epochs=3)
    assert plain(load(store, plan, 0, 2, num_workers=0)) == plain(load(store, plan, 0, 2, num_workers=3))


def test_a_resumed_loader_goes_on_where_the_first_one_stopped_also_in_a_later_epoch(make_store: MakeStore) -> None:
    store = make_store([3 + row % 9 for row in range(40)])
    settings = {"seed": 5, "global_batch_size": 4, "epochs": 3}
    whole = plain(load(store, plan_run(store.num_sequences, **settings), 1, 2))
    for cut in range(len(whole)):
        resumed = plan_run(store.num_sequences, **settings, first_step=cut, first_position=whole[cut - 1][2] if cut else 0)
        assert plain(load(store, resumed, 1, 2)) == whole[cut:]


def test_a_micro_batch_is_laid_out_by_its_bounds(make_store: MakeStore) -> None:
    store = make_store([3, 4, 5, 6, 7, 8, 9, 10])
    plan = plan_run(store.num_sequences, seed=0, global_batch_size=2, epochs=1)
    for batch in load(store, plan, 0, 1, micro=2):
        for m in batch.micro_batches:
            assert len(m.sequence_bounds) == len(m.sequences) + 1
            assert m.sequence_bounds[-1] == len(m.samples) == len(m.document_bounds) - 1
            assert m.document_bounds[-1] == len(m.tokens) == len(m.trained)
            assert m.tokens.dtype == np.int64
            assert m.trained.dtype == bool
            for document, sample in enumerate(m.samples):
                where = slice(m.document_bounds[document], m.document_bounds[document + 1])
                row = int(sample.partition(":")[2])
                assert m.tokens[where].tolist() == [1000 * row + index for index in range(len(m.tokens[where]))]
                assert not m.trained[where][0]
                assert m.trained[where].any()
            for sequence in range(len(m.sequences)):
                first, last = m.sequence_bounds[sequence], m.sequence_bounds[sequence + 1]
                assert m.document_bounds[last] - m.document_bounds[first] <= store.sequence_length


def test_a_fault_in_a_reading_thread_reaches_the_loop(make_store: MakeStore) -> None:
    store = make_store([6] * 12, packing=False)
    torn = TokenStore(store.folder, store.rows, store.documents[:6], store.entries, store.bounds, store.manifest)
    plan = plan_run(12, seed=0, global_batch_size=2, epochs=1)
    threads = threading.active_count()
    with pytest.raises(IndexError):
        load(torn, plan, 0, 1, num_workers=2)
    assert threading.active_count() == threads


def test_closing_early_ends_the_threads(make_store: MakeStore) -> None:
    before = threading.active_count()
    store = make_store([6] * 200, packing=False)
    loader = Loader(store, plan_run(200, seed=0, global_batch_size=2, epochs=9), divide(2, 1, 1), 0, num_workers=3)
    batches = iter(loader)
    assert next(batches).step == 0
    assert threading.active_count() > before
    loader.close()
    loader.close()
    assert threading.active_count() == before


@pytest.mark.claim(
    "X30",
    command="fleetune train --num-workers 4",
    seen="data_wait_s in every step's record",
)
@pytest.mark.claim(
    "X41",
    command="fleetune train",
    seen="waiting for data is measured apart from the step",
)
def test_waiting_for_data_is_measured(make_store: MakeStore) -> None:
    store = make_store([6] * 20, packing=False)
    plan = plan_run(20, seed=0, global_batch_size=4, epochs=1)
    assert all(batch.data_wait_s > 0 for batch in load(store, plan, 0, 1, num_workers=0))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 8, 20, 10_000])
def test_evaluation_reads_each_document_once_over_all_ranks(make_store: MakeStore, ranks: int, limit: int) -> None:
    store = make_store([3 + row % 9 for row in range(25)], in_order=True)
    found = [
        m
        for rank in range(ranks)
        for m in evaluation_batches(store, micro_batch_tokens=limit, data_rank=rank, data_ranks=ranks)
    ]
    in_order = sorted(found, key=lambda m: m.number)
    assert [m.number for m in in_order] == list(range(len(found)))
    assert [sample for m in in_order for sample in m.samples] == [f"f0:{row}" for row in range(1, 26)]
    assert all(m.num_tokens <= limit or len(m.samples) == 1 for m in found)
    assert all(m.step == -1 for m in found)


def test_evaluation_of_the_first_rows_takes_all_their_pieces(make_store: MakeStore) -> None:
    store = make_store([40, 40, 5, 40], over_long="split", in_order=True)
    batches = evaluation_batches(store, micro_batch_tokens=1, data_rank=0, data_ranks=1, max_rows=2)
    rows = [sample.partition("#")[0] for m in batches for sample in m.samples]
    assert set(rows) == {"f0:1", "f0:2"}
    assert len(rows) > 2


def test_the_heaviest_sequences_have_the_longest_document_then_the_most_tokens(
    make_store: Callable[..., Any],
) -> None:
    store = make_store([3, 9, 16, 5, 7, 12, 2])
    order = store.heaviest_first()
    assert sorted(order) == list(range(store.num_sequences))
    weights = []
    for number in order:
        lengths = [int(store.documents[int(entry["document"])]["length"]) for entry in store.entries_of(int(number))]
        weights.append((max(lengths), sum(lengths)))
    assert weights == sorted(weights, reverse=True) and weights[0] == (16, 16)
