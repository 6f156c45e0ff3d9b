"""One document of a store as text, with the part that is trained: what `fleetune data preview` shows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetune.data.store import TokenStore


@dataclass(frozen=True)
class Segment:
    """A run of tokens that are all trained, or all not."""

    text: str
    trained: bool
    num_tokens: int


@dataclass(frozen=True)
class Example:
    """sample: its id. segments: the whole document in order."""

    sample: str
    segments: tuple[Segment, ...]


def example(store: TokenStore, tokenizer: Any, index: int) -> Example:
    """Document `index` (in reading order) of `store`. Raises IndexError where it has fewer."""
    if not 0 <= index < store.num_documents:
        raise IndexError(f"there are {store.num_documents} documents, counted from 0")
    tokens, trained = store.document(index)
    borders = [0, *(np.flatnonzero(np.diff(trained.astype(np.int8))) + 1).tolist(), len(tokens)]
    segments = tuple(
        Segment(decode(tokenizer, tokens[start:stop]), bool(trained[start]), stop - start)
        for start, stop in itertools.pairwise(borders)
    )
    return Example(store.sample_id(index), segments)


def decode(tokenizer: Any, tokens: np.ndarray) -> str:
    """Text of `tokens`, control tokens included, nothing tidied."""
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
