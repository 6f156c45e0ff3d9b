"""From the plan to micro-batches: each data rank reads its own, ahead of the loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from fleetune.data.plan import SamplePlan
from fleetune.data.store import ENTRY, TokenStore, bounds_of
from fleetune.spec.batches import Batches, divide
from fleetune.spec.records import MicroBatch, StepBatch

#: Steps that each reading thread may be ahead of the loop.
STEPS_AHEAD = 2


class Loader:
    """The steps of `plan`, as one data rank runs them. Iterate once; `close` (or leave the `with`) ends its threads.

    batches: the division of a full step. A short last step is divided anew, so its shares are even too; a rank that has
    no part in it gets no micro-batches, and the others' numbers are the same for every world.
    num_workers: threads that read ahead; 0 reads in the loop.
    """

    def __init__(self, store: TokenStore, plan: SamplePlan, batches: Batches, data_rank: int, *, num_workers: int = 1) -> None:
        if plan.num_sequences != store.num_sequences:
            raise ValueError(f"the plan counts {plan.num_sequences} sequences and the store has {store.num_sequences}")
        if plan.global_batch_size != batches.global_batch_size:
            raise ValueError(
                f"a step is {plan.global_batch_size} sequences in the plan, {batches.global_batch_size} in the batches"
            )
        self.store = store
        self.plan = plan
        self.batches = batches
        self.data_rank = data_rank
        self.num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="fleetune-data") if num_workers else None

    def __iter__(self) -> Iterator[StepBatch]:
        steps = range(self.plan.first_step, self.plan.num_steps)
        return self._ahead(steps) if self._threads else self._in_the_loop(steps)

    def _in_the_loop(self, steps: range) -> Iterator[StepBatch]:
        for step in steps:
            began = time.monotonic()
            micro_batches, samples = self.read(step)
            yield self._batch(step, micro_batches, samples, time.monotonic() - began)

    def _ahead(self, steps: range) -> Iterator[StepBatch]:
        assert self._threads is not None
        waiting: deque[Future[tuple[tuple[MicroBatch, ...], tuple[str, ...]]]] = deque()
        remaining = iter(steps)
        try:
            for step in steps:
                while len(waiting) < self.num_workers * STEPS_AHEAD and (following := next(remaining, None)) is not None:
                    waiting.append(self._threads.submit(self.read, following))
                began = time.monotonic()
                micro_batches, samples = waiting.popleft().result()
                yield self._batch(step, micro_batches, samples, time.monotonic() - began)
        finally:
            self.close()

    def _batch(
        self, step: int, micro_batches: tuple[MicroBatch, ...], samples: tuple[str, ...], data_wait_s: float
    ) -> StepBatch:
        return StepBatch(step, micro_batches, samples, self.plan.next_position(step), data_wait_s)

    def read(self, step: int) -> tuple[tuple[MicroBatch, ...], tuple[str, ...]]:
        """This rank's micro-batches of `step`, and the sample ids of the whole step."""
        sequences = self.plan.step(step)
        batches, size = self.batches, self.batches.micro_batch_size
        if len(sequences) < batches.global_batch_size:
            batches = divide(len(sequences), size, len(batches.shares))
        micro_batches = tuple(
            self.store.micro_batch(step=step, number=number, sequences=sequences[number * size : (number + 1) * size])
            for number in batches.range_of(self.data_rank)
        )
        return micro_batches, self.store.sample_ids(sequences)

    def close(self) -> None:
        """End the reading threads; what they read ahead is dropped. May be called twice."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def evaluation_batches(
    store: TokenStore, *, micro_batch_tokens: int, data_rank: int, data_ranks: int, max_rows: int | None = None
) -> Iterator[MicroBatch]:
    """Every document of `store` exactly once over all data ranks, in reading order, as micro-batches of step -1.

    A micro-batch is a run of documents of at most `micro_batch_tokens` (or one longer document); micro-batch i goes to data
    rank i modulo `data_ranks`, so what a micro-batch holds does not depend on the world. Each document is a sequence of its
    own, numbered by its document. max_rows: only the first so many rows.
    """
    lengths = store.documents["length"][: store.num_documents_of(max_rows)]
    for number, run in enumerate(_runs(lengths, micro_batch_tokens)):
        if number % data_ranks == data_rank:
            entries = np.zeros(len(run), dtype=ENTRY)
            entries["document"] = np.arange(run.start, run.stop)
            yield store.gather(
                step=-1, number=number, sequences=tuple(run), entries=entries, sequence_bounds=bounds_of([1] * len(run))
            )


def _runs(lengths: np.ndarray, limit: int) -> Iterator[range]:
    """Cut 0..N-1 into runs whose lengths add up to at most `limit`; a longer one stands alone."""
    start, total = 0, 0
    for number, length in enumerate(lengths.tolist()):
        if number > start and total + length > limit:
            yield range(start, number)
            start, total = number, 0
        total += length
    if len(lengths) > start:
        yield range(start, len(lengths))
