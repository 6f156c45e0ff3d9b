"""Micro-batches of random tokens, and the same documents one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fleetune.spec.records import MicroBatch

EMPTY = MicroBatch(
    step=0,
    number=0,
    sequences=(),
    tokens=np.zeros(0, dtype=np.int64),
    trained=np.zeros(0, dtype=bool),
    document_bounds=np.zeros(1, dtype=np.int64),
    sequence_bounds=np.zeros(1, dtype=np.int64),
    samples=(),
)


def random_batch(
    lengths: Sequence[int], *, seed: int = 0, share: float = 0.6, step: int = 3, vocabulary: int = 300
) -> MicroBatch:
    """One document per sequence, with about `share` of the tokens trained (never a document's first)."""
    random = np.random.default_rng(seed)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    trained = random.random(bounds[-1]) < share
    trained[bounds[:-1]] = False
    return MicroBatch(
        step=step,
        number=0,
        sequences=tuple(range(100, 100 + len(lengths))),
        tokens=random.integers(3, vocabulary, bounds[-1]).astype(np.int64),
        trained=trained,
        document_bounds=bounds,
        sequence_bounds=np.arange(len(lengths) + 1, dtype=np.int64),
        samples=tuple(f"random:{index}" for index in range(len(lengths))),
    )


def one_by_one(batch: MicroBatch) -> list[MicroBatch]:
    """Each document (which must be a sequence of its own) as a micro-batch of its own."""
    assert len(batch.sequences) == len(batch.samples)
    parts = []
    for index, sample in enumerate(batch.samples):
        start, end = batch.document_bounds[index : index + 2]
        parts.append(
            MicroBatch(
                step=batch.step,
                number=index,
                sequences=batch.sequences[index : index + 1],
                tokens=batch.tokens[start:end],
                trained=batch.trained[start:end],
                document_bounds=np.array([0, end - start]),
                sequence_bounds=np.array([0, 1]),
                samples=(sample,),
            )
        )
    return parts


def train_all(batch: MicroBatch) -> MicroBatch:
    """The same batch with every token trained that can be."""
    trained = np.ones(batch.num_tokens, dtype=bool)
    trained[batch.document_bounds[:-1]] = False
    return MicroBatch(**{**vars(batch), "trained": trained})
