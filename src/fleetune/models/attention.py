"""Attention per document for the flat layout, registered with transformers under `NAME`.

Families that call transformers' attention interface hand over query, key and value of the whole flat row, what their
layer asks for (scaling, soft cap, sinks, dropout) and the `laid_out` keyword that `CausalModel` gave to the model's
forward. The mask they built arrives as a `CausalMask`: which keys a query may see, without a tensor. Whatever is not
known here raises, and the probe then chooses the other layout: nothing is ever left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from fleetune.models.dropout import Randomness, attention_mask_of, name_key, rounded_rate
from fleetune.models.grouped_attention import attend_grouped

if TYPE_CHECKING:
    from fleetune.models.layout import DocumentGroup, Grouping, LaidOut

NAME = "fleetune_documents"
#: The same, with masks checked for patterns that are not known here; for one lone document only.
CHECKED_NAME = "fleetune_documents_checked"

#: Keywords that families pass and that change nothing here: bookkeeping, or what the layer has applied already.
_HARMLESS = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "cache",
        "past_key_values",
        "past_key_value",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "position_embeddings",
        "layer_idx",
        "sliding_window",
        "num_items_in_batch",
    ]
)


class Unsuited(Exception):
    """This family's attention asks for something the flat layout cannot do; it uses the documents layout."""


@dataclass(frozen=True)
class CausalMask:
    """Keys at or before the query, in the same document; at most `window` of them where it is given."""

    window: int | None


@dataclass(frozen=True)
class LayerAttention:
    """What one layer asks of its attention. dropout: rate of the probabilities, 0 in eval mode."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    dropout: float

    @property
    def special(self) -> bool:
        """Whether scores become probabilities in more than one softmax."""
        return self.softcap is not None or self.sinks is not None


def register() -> None:
    """Make both names known to transformers. Cheap; may be called often."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name, describe in ((NAME, describe_mask), (CHECKED_NAME, describe_checked_mask)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, describe)


def describe_mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> CausalMask | None:
    """Takes the place of transformers' mask tensors; None for a pattern of the family's own, which no layer may use."""
    return None if use_vmap else CausalMask(local_size)


def describe_checked_mask(*, mask_function: Callable, local_size: int | None = None, **others: Any) -> CausalMask | None:
    """As `describe_mask`, and asks the pattern itself, which for a lone document is bare.

    Chunks have a local size too, as a window has; only asking tells them apart.
    """
    size = local_size or 3
    zero, query = torch.tensor(0), torch.tensor(size)
    sees = [bool(mask_function(zero, zero, query, torch.tensor(key))) for key in (0, 1, size, size + 1)]
    known = sees == [local_size is None, True, True, False]
    return describe_mask(local_size=local_size, **others) if known else None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask | None,
    *,
    laid_out: LaidOut | None = None,
    randomness: Randomness | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each document of a flat row.

    query [1, heads, T, d], key and value [1, key heads, T, d] -> [1, T, heads, d of value].
    """
    unknown = sorted(
        name for name, given in others.items() if name not in _HARMLESS and given is not None and given is not False
    )
    if laid_out is None or not isinstance(attention_mask, CausalMask) or is_causal is False or unknown:
        raise Unsuited(
            f"{type(module).__name__} does not tell its attention function of the documents, or asks for what is not known "
            f"there ({', '.join(unknown) or 'a mask of its own'})"
        )
    asked = LayerAttention(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=attention_mask.window,
        softcap=softcap,
        sinks=s_aux,
        dropout=rounded_rate(dropout),
    )
    keys = None
    if asked.dropout and randomness is not None:
        keys = randomness.keys_of(name_key(randomness.next_site()), query.device)
    grouping = laid_out.grouping
    assert grouping is not None
    if query.device.type == "cpu" and not asked.special and keys is None:
        q, k, v = (_computed(x)[0].transpose(0, 1) for x in (query, key, value))
        return attend_grouped(q, k, v, grouping, scaling=asked.scaling, window=asked.window)[None], None
    q, k, v = (_parts(_Gather.apply(x[0].transpose(0, 1), grouping), grouping) for x in (query, key, value))
    rows = [None] * len(q) if keys is None else _parts(keys.index_select(0, grouping.gather), grouping)
    outputs = [_attend_group(group, parts, asked, keys=own) for group, *parts, own in zip(grouping.groups, q, k, v, rows)]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Restore.apply(joined, grouping)[None], None


def _computed(x: torch.Tensor) -> torch.Tensor:
    """In the dtype that products have under autocast, where that is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _Gather(torch.autograd.Function):
    """Slots [C, ...] -> rows of the groups [P, ...]. As the rows beyond a document's end have no gradient, the backward
    only has to pick, where that of `index_select` would add up."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, grouping: Grouping) -> torch.Tensor:
        ctx.grouping = grouping
        return slots.index_select(0, grouping.gather)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        slots = gradient.index_select(0, ctx.grouping.restore)
        slots[ctx.grouping.num_tokens :] = 0
        return slots, None


class _Restore(torch.autograd.Function):
    """Rows of the groups [P, ...] -> slots [C, ...]; the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, grouping: Grouping) -> torch.Tensor:
        ctx.grouping = grouping
        return rows.index_select(0, grouping.restore)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient.index_select(0, ctx.grouping.gather).index_fill_(0, ctx.grouping.pads, 0), None


def _parts(rows: torch.Tensor, grouping: Grouping) -> tuple[torch.Tensor, ...]:
    """[P, ...] -> [count * length, ...] of each group."""
    sizes = [group.count * group.length for group in grouping.groups]
    return rows.split(sizes) if len(sizes) > 1 else (rows,)


def _attend_group(
    group: DocumentGroup, parts: list[torch.Tensor], asked: LayerAttention, *, keys: torch.Tensor | None
) -> torch.Tensor:
    """[count * length, heads, d] of one group of documents."""
    shape = (group.count, group.length)
    q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
    output = _attend(q, k, v, asked, None if keys is None else keys.view(shape))
    return output.transpose(1, 2).flatten(0, 1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: LayerAttention, keys: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention: q [G, heads, L, d], k and v [G, key heads, L, d] -> [G, heads, L, d]. keys: int64 [G, L]."""
    length = q.shape[2]
    window = asked.window if asked.window is not None and asked.window < length else None
    if not asked.special and keys is None:
        mask = None if window is None else _visible(length, window, q.device)
        grouped = q.shape[1] != k.shape[1]
        if grouped and mask is not None:  # fused kernels fold grouped heads only without one
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=asked.scaling, enable_gqa=grouped
        )
    return _attend_plainly(q, k, v, asked, window, keys)


def _attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    asked: LayerAttention,
    window: int | None,
    keys: torch.Tensor | None,
) -> torch.Tensor:
    """As `_attend`, with matrix products; the query heads that share a key head are rows of one product."""
    groups, heads, length, width = q.shape
    key_heads = k.shape[1]
    folded = heads // key_heads
    q = q.reshape(groups * key_heads, folded * length, width)
    k = k.reshape(groups * key_heads, length, width)
    v = v.reshape(groups * key_heads, length, v.shape[-1])
    hidden = ~_visible(length, window, q.device)
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
    bias = bias.repeat(folded, 1).expand(groups * key_heads, -1, -1)
    if asked.softcap is None:
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=asked.scaling)
    else:
        scores = torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (asked.scaling / asked.softcap)) * asked.softcap + bias
    if asked.sinks is not None:
        sinks = asked.sinks.to(scores.dtype).view(1, key_heads, folded, 1, 1).expand(groups, -1, -1, length, -1)
        sinks = sinks.reshape(groups * key_heads, folded * length, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1].to(q.dtype)
    else:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    if keys is not None:
        keep = attention_mask_of(keys[:, None], heads, length, asked.dropout).view(weights.shape)
        weights = torch.where(keep, weights, 0) * (1.0 / (1.0 - asked.dropout))
    return torch.bmm(weights, v).view(groups, heads, length, v.shape[-1])


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [L, L]: whether the query (row) sees the key (column)."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
