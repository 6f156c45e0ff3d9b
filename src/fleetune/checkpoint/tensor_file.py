"""Safetensors files as bytes: the header of a new one. Those that are found are read by `spec.safetensors_header`.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length of the header, the header as JSON (name ->
dtype, shape, [start, end) of its bytes), then the bytes of all tensors without gaps. Nothing in it can run code.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetune.spec.stored_tensor import VALUE_BYTES

#: Number formats that a checkpoint may hold, by their torch names; any other is refused.
DTYPE_OF_TORCH: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

#: Bytes per element of each.
DTYPE_BYTES: Mapping[str, int] = {dtype: VALUE_BYTES[dtype] for dtype in DTYPE_OF_TORCH.values()}


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file. dtype: a key of `DTYPE_BYTES`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def header_bytes(entries: Sequence[tuple[str, HeaderEntry]]) -> bytes:
    """Length and header of a file that holds `entries` in this order. The data behind it starts at a multiple of 8."""
    header: dict[str, Any] = {}
    start = 0
    for key, entry in entries:
        end = start + entry.num_bytes
        header[key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
