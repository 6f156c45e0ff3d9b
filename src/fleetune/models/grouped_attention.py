"""Causal attention of the documents of a flat row as one operation of matrix products, with a backward written by hand.

It keeps query, key and value as they came, and of short documents the probabilities. Of long ones these are made again in the
backward; rows are taken a tile at a time, so that keys no row of a tile can see are never multiplied and the memory of a long
document does not grow with the square of its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fleetune.models.layout import DocumentGroup, Grouping

#: Query rows of one tile, per head. Documents of one tile keep their probabilities: half a kilobyte a token and head at most,
#: and a softmax costs as much as all products of a document of that length.
_TILE_ROWS = 256


@dataclass(frozen=True)
class _Tile:
    """Rows [first, last) of the queries and the keys [from_key, last) that they may see."""

    first: int
    last: int
    from_key: int


def attend_grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grouping: Grouping, *, scaling: float, window: int | None
) -> torch.Tensor:
    """query [T, heads, d], key [T, key heads, d], value [T, key heads, e], all of one dtype -> [T, heads, e].

    T: the slots of the flat row; those behind the last token get no gradient. window: keys that a query sees at most.
    """
    return _GroupedAttention.apply(query, key, value, grouping, scaling, window)


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        grouping: Grouping,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        ctx.asked = (grouping, scaling, window)
        outputs, kept = [], []
        with torch.autocast(query.device.type, enabled=False):
            for group, rows in _groups(grouping):
                q, k, v = _of_group((query, key, value), group, rows)
                made = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
                for tile in _tiles(group.length, window):
                    weights = _weights(q, k, tile, grouping, scaling, window)
                    kept.append(weights if group.length <= _TILE_ROWS else None)
                    made[:, :, tile.first : tile.last] = _unflat(torch.bmm(weights, v[:, tile.from_key : tile.last]), q)
                outputs.append(_unfolded(made, group))
            ctx.save_for_backward(query, key, value, *(weights for weights in kept if weights is not None))
            return _joined(outputs).index_select(0, grouping.restore)

    @staticmethod
    def backward(ctx: Any, d_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, key, value, *kept = ctx.saved_tensors
        grouping, scaling, window = ctx.asked
        found: tuple[list[torch.Tensor], ...] = ([], [], [])
        with torch.autocast(query.device.type, enabled=False):
            rows_of_gradient = d_output.index_select(0, grouping.gather).index_fill_(0, grouping.pads, 0)
            parts = rows_of_gradient.split([group.count * group.length for group in grouping.groups])
            for (group, rows), part in zip(_groups(grouping), parts):
                q, k, v = _of_group((query, key, value), group, rows)
                d_y = _folded(part, group, k.shape[0] // group.count)
                weights = kept.pop(0) if group.length <= _TILE_ROWS else None
                for gradients, made in zip(found, _backward_of_group((q, k, v, d_y, weights), grouping, scaling, window)):
                    gradients.append(_unfolded(made, group))
            return (*(_to_slots(_joined(made), grouping) for made in found), None, None, None)


def _backward_of_group(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    grouping: Grouping,
    scaling: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q [B, F, L, d], k [B, L, d] and v [B, L, e] of a group, of k and v as [B, 1, L, .].

    given: these three, the gradient [B, F, L, e] of the output, and the probabilities, if they were kept. Sums over several
    tiles are taken in fp32.
    """
    q, k, v, d_output, kept = given
    tiles = list(_tiles(k.shape[1], window))
    exact = torch.float32 if len(tiles) > 1 else k.dtype
    d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
    for tile in tiles:
        keys = slice(tile.from_key, tile.last)
        weights = _weights(q, k, tile, grouping, scaling, window) if kept is None else kept
        d_y, own = _flat(d_output, tile), _flat(q, tile)
        d_v[:, keys] += torch.bmm(weights.transpose(1, 2), d_y)
        d_weights = torch.bmm(d_y, v[:, keys].transpose(1, 2))
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(scaling)
        d_q[:, :, tile.first : tile.last] = _unflat(torch.bmm(d_scores, k[:, keys]), q)
        d_k[:, keys] += torch.bmm(d_scores.transpose(1, 2), own)
    return d_q, d_k.to(k.dtype)[:, None], d_v.to(v.dtype)[:, None]


def _weights(
    q: torch.Tensor, k: torch.Tensor, tile: _Tile, grouping: Grouping, scaling: float, window: int | None
) -> torch.Tensor:
    """Probabilities [B, F * rows, keys] of a tile; exponentials and their sums are fp32 inside of the softmax."""
    folded = q.shape[1]
    made = (tile, window, folded, q.dtype)
    bias = grouping.biases.get(made)
    if bias is None:
        bias = grouping.biases[made] = _bias(tile, window, q.dtype, q.device).repeat(folded, 1)
    keys = k[:, tile.from_key : tile.last].transpose(1, 2)
    return torch.softmax(torch.baddbmm(bias.expand(len(k), -1, -1), _flat(q, tile), keys, alpha=scaling), -1)


def _bias(tile: _Tile, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, keys]: 0 where the query (row) sees the key (column), else minus infinity."""
    rows = torch.arange(tile.first, tile.last, device=device)
    distance = rows[:, None] - torch.arange(tile.from_key, tile.last, device=device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _tiles(length: int, window: int | None) -> Iterator[_Tile]:
    for first in range(0, length, _TILE_ROWS):
        from_key = 0 if window is None else max(0, first - window + 1)
        yield _Tile(first, min(length, first + _TILE_ROWS), from_key)


def _flat(x: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """[B, F, L, d] -> the tile's rows as [B, F * rows, d]."""
    return x[:, :, tile.first : tile.last].reshape(len(x), -1, x.shape[-1])


def _unflat(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B, F * rows, d] -> [B, F, rows, d]."""
    return rows.view(len(rows), like.shape[1], -1, rows.shape[-1])


def _groups(grouping: Grouping) -> Iterator[tuple[DocumentGroup, torch.Tensor]]:
    """Each group with the slots of its rows, int64 [count * length]."""
    start = 0
    for group in grouping.groups:
        size = group.count * group.length
        yield group, grouping.gather[start : start + size]
        start += size


def _of_group(
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor], group: DocumentGroup, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [B, F, L, d], k [B, L, d], v [B, L, e] of one group, where B = count * key heads and F query heads share a key head."""
    key_heads = slots[1].shape[1]
    q, k, v = (_folded(x.index_select(0, rows), group, key_heads) for x in slots)
    return q, k.flatten(0, 1), v.flatten(0, 1)


def _folded(rows: torch.Tensor, group: DocumentGroup, key_heads: int) -> torch.Tensor:
    """[count * L, heads, d] -> [B, heads / key heads, L, d]."""
    x = rows.view(group.count, group.length, key_heads, -1, rows.shape[-1])
    return x.permute(0, 2, 3, 1, 4).reshape(group.count * key_heads, -1, group.length, rows.shape[-1])


def _unfolded(x: torch.Tensor, group: DocumentGroup) -> torch.Tensor:
    """[B, F, L, d] -> [count * L, heads, d]."""
    x = x.view(group.count, -1, x.shape[1], group.length, x.shape[-1])
    return x.permute(0, 3, 1, 2, 4).reshape(group.count * group.length, -1, x.shape[-1])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _to_slots(rows: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    """[P, heads, d] -> [T, heads, d], nothing behind the last token."""
    slots = rows.index_select(0, grouping.restore)
    slots[grouping.num_tokens :] = 0
    return slots
