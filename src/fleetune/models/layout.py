"""How the documents of a micro-batch are laid into tensors. Two layouts with one meaning.

`flat`: one row of all tokens, positions restart at each document, attention is computed per document (`attention.py`).
`documents`: one right-padded row per document with the model's own attention. A causal model never looks to the right, so
padding there needs no mask and changes nothing; padding repeats the document's own last token, so that not even a
non-finite embedding of some other token can enter.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from fleetune.spec.records import MicroBatch

Layout = Literal["flat", "documents"]

#: Lengths are rounded up to a multiple of this: a row of the matrix units' tiles, and few enough different shapes. Libraries
#: keep the kernels that they make for each shape: with every length a shape of its own, a run of SmolLM2 on a CPU with AMX
#: grew by 20 MB a step, to 6.5 GB, and spent time on making them.
TILE = 32
#: Score elements per head that one group computes at most.
_GROUP_AREA = 1 << 20


@dataclass(frozen=True, eq=False)
class Origins:
    """Where the token of each slot of a layout comes from; int64 [R * C] each. Keys of dropout."""

    sequences: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class DocumentGroup:
    """`count` documents of at most `length` tokens, a multiple of `TILE`, whose attention is computed together."""

    count: int
    length: int


@dataclass(frozen=True, eq=False)
class Grouping:
    """The flat row's C slots as the rows of groups, one group after the other, P rows in all.

    gather: int64 [P], the slot of each row; a document's rows beyond its end repeat its last slot. restore: int64 [C], the
    row of each slot; slots behind the last token take the last row. pads: int64, the rows beyond a document's end.
    num_tokens: slots from here on hold no token. They and `pads` have no gradient: nothing is read from them.
    biases: what hides keys from queries, once made; all layers of a forward share it.
    """

    groups: tuple[DocumentGroup, ...]
    gather: torch.Tensor
    restore: torch.Tensor
    pads: torch.Tensor
    num_tokens: int
    biases: dict[Hashable, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A micro-batch as tensors on a device, in one of the layouts.

    tokens: int64 [R, C]; flat: R = 1, and C is a multiple of `TILE`: slots behind the last token repeat it, nobody attends to
    them, and nothing is read from them. positions: int64 [1, C] where flat, else None (0, 1, ... in each row).
    select: int64 [N], slots of the flattened [R * C] that predict a trained token, in the order of the tokens.
    targets: int64 [N], the tokens they predict.
    grouping: flat only; which documents are attended together.
    token_of_slot: int64 [R * C], the token (as a micro-batch counts them, 0 to T - 1) that each slot holds; slot_of_token:
    int64 [T], where each token lies. documents only: in the flat layout the first T slots are the tokens.
    """

    layout: Layout
    step: int
    tokens: torch.Tensor
    positions: torch.Tensor | None
    select: torch.Tensor
    targets: torch.Tensor
    origins: Origins
    grouping: Grouping | None = None
    token_of_slot: torch.Tensor | None = None
    slot_of_token: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens T without padding."""
        if self.grouping is not None:
            return self.grouping.num_tokens
        assert self.slot_of_token is not None
        return int(self.slot_of_token.shape[0])

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
    slots = np.minimum(np.arange(_rounded(batch.num_tokens)), batch.num_tokens - 1)
    positions = np.arange(batch.num_tokens) - np.repeat(bounds[:-1], lengths)
    origins = _origins(batch)
    return LaidOut(
        layout="flat",
        step=batch.step,
        tokens=_tensor(batch.tokens[slots], device)[None],
        positions=_tensor(positions[slots], device)[None],
        select=_tensor(targets - 1, device),
        targets=_tensor(batch.tokens[targets], device),
        origins=Origins(origins.sequences[slots], origins.positions[slots]),
        grouping=_group(bounds[:-1], lengths, device),
    )


def _documents(batch: MicroBatch, device: torch.device) -> LaidOut:
    bounds = np.asarray(batch.document_bounds)
    lengths = np.diff(bounds)
    columns = int(lengths.max())
    slots = bounds[:-1, None] + np.minimum(np.arange(columns)[None, :], lengths[:, None] - 1)
    targets = np.flatnonzero(batch.trained)
    tokens = np.arange(batch.num_tokens)
    document = np.searchsorted(bounds, tokens, side="right") - 1
    slot_of_token = document * columns + tokens - bounds[document]
    origins = _origins(batch)
    flat_slots = slots.reshape(-1)
    return LaidOut(
        layout="documents",
        step=batch.step,
        tokens=_tensor(batch.tokens[slots], device),
        positions=None,
        select=_tensor(slot_of_token[targets - 1], device),
        targets=_tensor(batch.tokens[targets], device),
        origins=Origins(origins.sequences[flat_slots], origins.positions[flat_slots]),
        token_of_slot=_tensor(flat_slots, device),
        slot_of_token=_tensor(slot_of_token, device),
    )


def _origins(batch: MicroBatch) -> Origins:
    starts = np.asarray(batch.document_bounds)[np.asarray(batch.sequence_bounds)]
    lengths = np.diff(starts)
    return Origins(
        np.repeat(np.asarray(batch.sequences, dtype=np.int64), lengths),
        np.arange(batch.num_tokens, dtype=np.int64) - np.repeat(starts[:-1], lengths),
    )


def _group(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Grouping:
    """Group documents of one rounded length, in the order of their first one."""
    members: list[list[int]] = []
    open_group: dict[int, list[int]] = {}
    for document, length in enumerate(_rounded(int(own)) for own in lengths):
        group = open_group.get(length)
        if group is None or (len(group) + 1) * length**2 > _GROUP_AREA:
            group = open_group[length] = []
            members.append(group)
        group.append(document)
    order = [document for group in members for document in group]
    padded = np.array([_rounded(int(lengths[document])) for document in order])
    within = np.arange(int(padded.sum())) - np.repeat(np.cumsum(padded) - padded, padded)
    own = np.repeat(lengths[order], padded)
    gather = np.repeat(starts[order], padded) + np.minimum(within, own - 1)
    num_tokens = int(lengths.sum())
    restore = np.full(_rounded(num_tokens), len(gather) - 1, dtype=np.int64)
    is_token = within < own
    restore[gather[is_token]] = np.flatnonzero(is_token)
    return Grouping(
        groups=tuple(DocumentGroup(len(group), _rounded(int(lengths[group[0]]))) for group in members),
        gather=_tensor(gather, device),
        restore=_tensor(restore, device),
        pads=_tensor(np.flatnonzero(~is_token), device),
        num_tokens=num_tokens,
    )


def _rounded(length: int) -> int:
    return -(-length // TILE) * TILE


def _tensor(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device, non_blocking=True)
