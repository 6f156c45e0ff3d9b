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


@dataclass(frozen=True, eq=False)
class DocumentGroup:
    """Documents of the flat row whose attention is computed together: one slice, or several of similar length.

    length: L, of the longest. slots: int64 [G, L] into the flat row, a shorter document repeats its last slot;
    None for one document, which is the slice [start, start + L).
    """

    start: int
    length: int
    slots: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A micro-batch as tensors on a device, in one of the layouts.

    tokens: int64 [R, C]; flat: R = 1. positions: int64 [1, C] where flat, else None (0, 1, ... in each row).
    select: int64 [N], slots of the flattened [R * C] that predict a trained token, in the order of the tokens.
    targets: int64 [N], the tokens they predict.
    groups: flat only. restore: int64 [C] that puts the groups' outputs, one after the other, back in order; None where
    they are in order already.
    """

    layout: Layout
    step: int
    tokens: torch.Tensor
    positions: torch.Tensor | None
    select: torch.Tensor
    targets: torch.Tensor
    origins: Origins
    groups: tuple[DocumentGroup, ...] = ()
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
    groups, order = _group(bounds[:-1], lengths)
    return LaidOut(
        layout="flat",
        step=batch.step,
        tokens=_tensor(batch.tokens, device)[None],
        positions=_tensor(np.arange(batch.num_tokens) - np.repeat(bounds[:-1], lengths), device)[None],
        select=_tensor(targets - 1, device),
        targets=_tensor(batch.tokens[targets], device),
        origins=_origins(batch),
        groups=tuple(
            DocumentGroup(start, length, None if slots is None else _tensor(slots, device)) for start, length, slots in groups
        ),
        restore=None if order is None else _tensor(order, device),
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


def _group(starts: np.ndarray, lengths: np.ndarray) -> tuple[list[tuple[int, int, np.ndarray | None]], np.ndarray | None]:
    """Group documents of similar length. Returns (start, length, slots) of each group, and the order that restores."""
    groups: list[list[int]] = []
    for document in np.argsort(-lengths, kind="stable"):
        length = int(lengths[document])
        longest = int(lengths[groups[-1][0]]) if groups else 0
        fits = groups and longest**2 - length**2 <= _GROUPING_PADS and (len(groups[-1]) + 1) * longest**2 <= _GROUP_AREA
        if fits:
            groups[-1].append(int(document))
        else:
            groups.append([int(document)])
    groups.sort(key=lambda members: members[0])
    if all(len(members) == 1 for members in groups):
        return [(int(starts[m]), int(lengths[m]), None) for (m,) in groups], None
    made: list[tuple[int, int, np.ndarray | None]] = []
    order = np.empty(int(lengths.sum()), dtype=np.int64)
    done = 0
    for members in groups:
        length = int(lengths[members[0]])
        if len(members) == 1:
            made.append((int(starts[members[0]]), length, None))
        else:
            within = np.minimum(np.arange(length)[None, :], lengths[members][:, None] - 1)
            made.append((-1, length, starts[members][:, None] + within))
        for row, member in enumerate(members):
            start = int(starts[member])
            order[start : start + int(lengths[member])] = done + row * length + np.arange(int(lengths[member]))
        done += len(members) * length
    return made, order


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device, non_blocking=True)
