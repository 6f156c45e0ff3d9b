"""Sizes of quantised weights, exact to the byte, and which weights are quantised at all. Plain arithmetic."""

from __future__ import annotations

from typing import Literal

#: int8: a row's values over its largest one (LLM.int8's weights, Dettmers et al. 2022, arXiv 2208.07339, section 2.1).
#: nf4: 4-bit NormalFloat in blocks, with the blocks' scales quantised once more (QLoRA, arXiv 2305.14314, section 3).
Scheme = Literal["int8", "nf4"]
SCHEMES: tuple[Scheme, ...] = ("int8", "nf4")

#: Weights that share a scale, and scales that share one.
NF4_BLOCK = 64
NF4_NESTED_BLOCK = 256


def is_quantizable(num_out: int, num_in: int) -> bool:
    """Whether a linear layer of this shape is quantised: not where an odd number of weights leaves half a byte over."""
    return num_out * num_in % 2 == 0


def quantized_bytes(scheme: str, num_out: int, num_in: int) -> int:
    """Bytes of the quantised weight of one linear layer, with all of its scales."""
    count = num_out * num_in
    if scheme == "int8":
        return count + 4 * num_out
    if scheme == "nf4":
        blocks = -(-count // NF4_BLOCK)
        return count // 2 + blocks + 4 * -(-blocks // NF4_NESTED_BLOCK) + 4
    raise ValueError(f"{scheme!r} is none of {', '.join(SCHEMES)}")
