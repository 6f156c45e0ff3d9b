"""Keyed dropout: which values are dropped is a pure function of a key, never of a process's random state.

The key of one value is (seed, step, sequence number, position in the sequence, name of the module, index of the feature):
splitting a micro-batch, moving it to another rank, laying it out otherwise or computing a block again under gradient
checkpointing changes no mask.

Quality. A token's 64-bit key is mixed by the finaliser of SplitMix64 (Steele, Lea, Flood 2014) over the fields above; per
value a 32-bit word is mixed by two multiply-xorshift rounds (the constants of C. Wellons' "lowbias32", avalanche bias
0.17), with half of the token's key entering before each round. Each word gives two values of 16 bits, so rates are
multiples of 1/65536. It is a hash for dropout, not a cryptographic one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from fleetune.models.layout import LaidOut

_LEVELS = 1 << 16
#: Distance between the column indices of two attention heads: more than half of any number of keys.
_HEAD_STRIDE = 1 << 22


def name_key(*parts: object) -> int:
    """A signed 64-bit number of a name (or of several parts), the same on every machine and in every process."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def token_keys(seed: int, step: int, sequences: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64 [T]: one key per token. sequences, positions: int64 [T], sequence number and position within the sequence."""
    start = np.uint64(name_key("dropout", seed, step) & 0xFFFF_FFFF_FFFF_FFFF)
    keys = _mix64(sequences.astype(np.uint64) + start)
    return _mix64(keys + positions.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15))


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return cast(np.ndarray, x ^ (x >> np.uint64(31)))


def keep_mask(keys: torch.Tensor, columns: torch.Tensor, width: int, rate: float) -> torch.Tensor:
    """bool [..., width], True where a value is kept, with probability 1 - rounded_rate(rate).

    keys: int64 [..., 1] per row, already mixed with the module's name. columns: int32, broadcast against the keys; its
    last dim has ceil(width / 2) words.
    """
    low = keys.to(torch.int32)  # the lower half: conversion wraps
    high = (keys >> 32).to(torch.int32)
    words = low ^ columns
    words ^= (words >> 16) & 0xFFFF
    words *= 0x7FEB_352D
    words ^= (words >> 15) & 0x1FFFF
    words ^= high
    words *= -2073254261  # 0x846CA68B as int32
    words ^= (words >> 16) & 0xFFFF
    halves = words.view(torch.int16)
    if halves.shape[-1] != width:
        halves = halves[..., :width]
    return halves >= round(rate * _LEVELS) - _LEVELS // 2


def rounded_rate(rate: float) -> float:
    """The rate that masks really have: the nearest multiple of 1/65536."""
    return round(rate * _LEVELS) / _LEVELS


class Randomness:
    """What every keyed dropout of one model needs to know: the seed, and which tokens the running forward is about.

    A model has one; `about` is entered around each forward, and again around each recomputation of a block.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        #: Whether the model calls torch's functional dropout itself; `about` then intercepts those calls.
        self.functional = False
        self.laid_out: LaidOut | None = None
        self._keys: torch.Tensor | None = None
        self._site = ("", 0)

    @contextmanager
    def about(self, laid_out: LaidOut | None, block: str = "") -> Iterator[None]:
        """Masks drawn inside are for the tokens of `laid_out`; functional dropouts are counted from the start of `block`."""
        before = (self.laid_out, self._keys, self._site)
        if laid_out is not self.laid_out:
            self.laid_out, self._keys = laid_out, None
        self._site = (block, 0)
        try:
            if self.functional:
                with _FunctionalDropout(self):
                    yield
            else:
                yield
        finally:
            self.laid_out, self._keys, self._site = before

    def enter_block(self, name: str) -> None:
        """The dropouts that a block calls without a module are named by the block and their order in it."""
        self._site = (name, 0)

    def next_site(self) -> str:
        name, count = self._site
        self._site = (name, count + 1)
        return f"{name}#{count}"

    def keys_of(self, module_key: int, device: torch.device) -> torch.Tensor:
        """int64 [R * C] for the running forward, mixed with a module's key."""
        if self.laid_out is None:
            raise RuntimeError("dropout needs to know its tokens: run the model through CausalModel.hidden, or in eval mode")
        if self._keys is None or self._keys.device != device:
            origins = self.laid_out.origins
            keys = token_keys(self.seed, self.laid_out.step, origins.sequences, origins.positions)
            self._keys = torch.from_numpy(keys.view(np.int64)).to(device)
        keys = self._keys ^ module_key
        keys = keys ^ ((keys >> 29) & 0x7_FFFF_FFFF)
        return cast(torch.Tensor, keys * -7046029254386353131)  # 0x9E3779B97F4A7C15 as int64

    def drop(
        self, values: torch.Tensor, rate: float, module_key: int, columns_of: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Dropout of activations [R, C, ...] or [R * C, ...], or of attention probabilities [R, heads, C, K].

        columns_of: (first, count) where the values are some columns of features [R, C, F]: first column, columns in all.
        """
        rate = rounded_rate(rate)
        if rate <= 0.0:
            return values
        keys = self.keys_of(module_key, values.device)
        rows, columns = cast("LaidOut", self.laid_out).tokens.shape
        shape = tuple(values.shape)
        if len(shape) == 4 and shape[0] == rows and shape[2] == columns:
            keep = attention_mask_of(keys.view(rows, 1, columns), shape[1], shape[3], rate)
        elif len(shape) >= 3 and shape[:2] == (rows, columns):
            first, width = columns_of or (0, values[0, 0].numel())
            keep = _feature_mask(keys, width, rate)[:, first : first + values[0, 0].numel()].reshape(shape)
        elif len(shape) >= 2 and shape[0] == rows * columns:
            keep = _feature_mask(keys, values[0].numel(), rate).view(shape)
        else:
            raise NotImplementedError(
                f"dropout of values of shape {shape} in a forward of {rows} x {columns} tokens: which token each value "
                "belongs to is not known, so it cannot be keyed; set this dropout to 0 in the model's config.json"
            )
        return torch.where(keep, values, 0) * (1.0 / (1.0 - rate))


def attention_mask_of(keys: torch.Tensor, num_heads: int, num_keys: int, rate: float) -> torch.Tensor:
    """bool [R, heads, Q, K] for attention probabilities. keys: int64 [R, 1, Q] of the query tokens.

    The column of a value is (head, key's position in its document), whatever K the layout pads to.
    """
    words = torch.arange((num_keys + 1) // 2, dtype=torch.int32, device=keys.device)
    heads = torch.arange(num_heads, dtype=torch.int32, device=keys.device) * _HEAD_STRIDE
    columns = _column_words(heads[:, None] + words[None, :])
    return keep_mask(keys[..., None], columns[None, :, None, :], num_keys, rate)


def _feature_mask(keys: torch.Tensor, width: int, rate: float) -> torch.Tensor:
    words = torch.arange((width + 1) // 2, dtype=torch.int32, device=keys.device)
    return keep_mask(keys[:, None], _column_words(words)[None, :], width, rate)


def _column_words(index: torch.Tensor) -> torch.Tensor:
    """Spread int32 indices over the whole range, so that neighbouring features differ in many bits."""
    return (index + 1) * -1640531527  # 2**32 / golden ratio, odd: no two indices collide


class KeyedDropout(nn.Module):
    """A dropout whose mask is a function of its key. Does nothing in eval mode. Has `p`, as torch's has."""

    def __init__(self, rate: float, name: str, randomness: Randomness) -> None:
        super().__init__()
        self.p = rate
        self.name = name
        self._key = name_key(name)
        self._randomness = randomness
        #: (first, count) where this rank sees only some columns of what is dropped from.
        self.columns: tuple[int, int] | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0.0:
            return values
        return self._randomness.drop(values, self.p, self._key, self.columns)

    def extra_repr(self) -> str:
        return f"p={self.p}, keyed by {self.name!r}"


class _FunctionalDropout(TorchFunctionMode):
    """Keys the calls of `torch.nn.functional.dropout` that a model makes without a module."""

    def __init__(self, randomness: Randomness) -> None:
        super().__init__()
        self._randomness = randomness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.dropout:
            return func(*args, **(kwargs or {}))
        return self._dropout(*args, **(kwargs or {}))

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        return self._randomness.drop(input, p, name_key(self._randomness.next_site()))
