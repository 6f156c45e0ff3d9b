"""Orders that are computed, not stored: a keyed bijection of 0..size-1, any position of which costs the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

_ROUNDS = 8


def key_of(*parts: int | str) -> int:
    """A 64-bit key from `parts`; the same on every machine and Python."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): uint64 [N] -> uint64 [N], a bijection that looks random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0..size-1 that depends on `key` alone.

    A Feistel network over the next power of four is a bijection whatever its round function is; what falls outside the
    range is sent through it again until it falls inside (cycle walking: Black and Rogaway, 2002), fewer than four times on
    average.
    """

    size: int
    key: int

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """int64 [N], each in 0..size-1 -> int64 [N]."""
        values = np.asarray(positions, dtype=np.int64)
        if values.size and (values.min() < 0 or values.max() >= self.size):
            raise IndexError(f"positions must be in 0..{self.size - 1}, got {values.min()}..{values.max()}")
        result = self._network(values.astype(np.uint64))
        outside = np.flatnonzero(result >= np.uint64(self.size))
        while outside.size:
            result[outside] = self._network(result[outside])
            outside = outside[result[outside] >= np.uint64(self.size)]
        return result.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        left, right = values >> shift, values & mask
        for number in range(_ROUNDS):
            round_key = np.uint64(key_of(self.key, number))
            left, right = right, left ^ (mix(right + round_key) & mask)
        return (left << shift) | right
