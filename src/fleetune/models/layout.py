"""How the documents of a micro-batch are laid into tensors. Two layouts with one meaning.

`flat`: one row of all tokens, positions restart at each document, attention is computed per document (`attention.py`).
`documents`: one right-padded row per document with the model's own attention. A causal model never looks to the right, so
padding there needs no mask and changes nothing; padding repeats the document's own last token, so that not even a
non-finite embedding of some other token can enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fleetune.spec.records import MicroBatch

Layout = Literal["flat", "documents"]

#: Padding that grouping may add to a document's attention, in score elements per head: about what one more call of the
#: attention's small operations costs on a CPU.
_GROUPING_PADS = 1024
_GROUP_AREA = 1 << 20


@dataclass(frozen=True, eq=False)
class Origins:
    """Where the token of each slot of a layout comes from; int64 [R * C] each. Keys of dropout."""

    sequences: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class DocumentGroup:
    """`count` documents of at most `length` tokens whose attention is computed together, [count, length] rows of it."""

    count: int
    length: int


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A micro-batch as tensors on a device, in one of the layouts.

    tokens: int64 [R, C]; flat: R = 1. positions: int64 [1, C] where flat, else None (0, 1, ... in each row).
    select: int64 [N], slots of the flattened [R * C] that predict a trained token, in the order of the tokens.
    targets: int64 [N], the tokens they predict.
    groups: flat only; what documents are attended together. gather: int64 [P], the slots of the groups' rows, one group
    after the other; a shorter document repeats its last slot. restore: int64 [C], where in [P] each slot is found again.
    Both are None where every document is alone in its group, in order, and P = C.
    """

    layout: Layout
    step: int
    tokens: torch.Tensor
    positions: torch.Tensor | None
    select: torch.Tensor
    targets: torch.Tensor
    origins: Origins
    groups: tuple[DocumentGroup, ...] = ()
    gather: torch.Tensor | None = None
    restore: torch.Tensor | None = None

    @property
    def weight(self) -> int:
        """Number of trained tokens N."""
        return int(self.targets.shape[0])


def lay_out(micro_batch: MicroBatch, layout: Layout, device: torch.device) -> LaidOut:
    """Lay a micro-batch out. An empty one becomes a single untrained token, so that a collective forward can run it."""
    if micro_batch.num_tokens == 0:
        micro_batch = _one_untrained_token(micro_batch.step)
    return _flat(micro_batch, device) if layout == "flat" else _documents(micro_batch, device)


def _one_untrained_token(step: int) -> MicroBatch:
    one = np.array([0, 1], dtype=np.int64)
    nothing = np.zeros(1, dtype=np.int64)
    return MicroBatch(step, -1, (-1,), nothing, nothing.astype(bool), one, one, ("",))


def _flat(batch: MicroBatch, device: torch.device) -> LaidOut:
    bounds = np.asarray(batch.document_bounds)
    lengths = np.diff(bounds)
    targets = np.flatnonzero(batch.trained)
    groups, gather, restore = _group(bounds[:-1], lengths)
    return LaidOut(
        layout="flat",
        step=batch.step,
        tokens=_tensor(batch.tokens, device)[None],
        positions=_tensor(np.arange(batch.num_tokens) - np.repeat(bounds[:-1], lengths), device)[None],
        select=_tensor(targets - 1, device),
        targets=_tensor(batch.tokens[targets], device),
        origins=_origins(batch),
        groups=groups,
        gather=None if gather is None else _tensor(gather, device),
        restore=None if restore is None else _tensor(restore, device),
    )


def _documents(batch: MicroBatch, device: torch.device) -> LaidOut:
    bounds = np.asarray(batch.document_bounds)
    lengths = np.diff(bounds)
    columns = int(lengths.max())
    slots = bounds[:-1, None] + np.minimum(np.arange(columns)[None, :], lengths[:, None] - 1)
    targets = np.flatnonzero(batch.trained)
    document = np.searchsorted(bounds, targets, side="right") - 1
    origins = _origins(batch)
    flat_slots = slots.reshape(-1)
    return LaidOut(
        layout="documents",
        step=batch.step,
        tokens=_tensor(batch.tokens[slots], device),
        positions=None,
        select=_tensor(document * columns + targets - 1 - bounds[document], device),
        targets=_tensor(batch.tokens[targets], device),
        origins=Origins(origins.sequences[flat_slots], origins.positions[flat_slots]),
    )


def _origins(batch: MicroBatch) -> Origins:
    starts = np.asarray(batch.document_bounds)[np.asarray(batch.sequence_bounds)]
    lengths = np.diff(starts)
    return Origins(
        np.repeat(np.asarray(batch.sequences, dtype=np.int64), lengths),
        np.arange(batch.num_tokens, dtype=np.int64) - np.repeat(starts[:-1], lengths),
    )


def _group(starts: np.ndarray, lengths: np.ndarray) -> tuple[tuple[DocumentGroup, ...], np.ndarray | None, np.ndarray | None]:
    """Group documents of similar length, in the order of their first one. Returns (groups, gather, restore)."""
    members: list[list[int]] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        longest = int(lengths[members[-1][0]]) if members else 0
        near = longest**2 - int(lengths[document]) ** 2 <= _GROUPING_PADS
        if members and near and (len(members[-1]) + 1) * longest**2 <= _GROUP_AREA:
            members[-1].append(document)
        else:
            members.append([document])
    members.sort(key=lambda group: group[0])
    groups = tuple(DocumentGroup(len(group), int(lengths[group[0]])) for group in members)
    if all(group.count == 1 for group in groups):
        return groups, None, None
    gather: list[np.ndarray] = []
    restore = np.empty(int(lengths.sum()), dtype=np.int64)
    done = 0
    for group, length in ((group, int(lengths[group[0]])) for group in members):
        for document in group:
            start, own = int(starts[document]), int(lengths[document])
            gather.append(start + np.minimum(np.arange(length), own - 1))
            restore[start : start + own] = done + np.arange(own)
            done += length
    return groups, np.concatenate(gather), restore


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device, non_blocking=True)
