"""Safetensors files as bytes: writing the header of a new one, checking the header of one that is found.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length of the header, the header as JSON (name ->
dtype, shape, [start, end) of its bytes), then the bytes of all tensors without gaps. Nothing in it can run code.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

#: A longer header is refused before it is read. The safetensors library has the same limit.
MAX_HEADER_BYTES = 100_000_000

#: As many dims as torch itself allows.
MAX_DIMS = 64

#: Bytes per element of every number format that a checkpoint may hold; anything else is refused.
DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

#: The same formats by their torch names.
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


def read_header(file: BinaryIO, size: int) -> dict[str, HeaderEntry]:
    """The checked header of an open file of `size` bytes. Raises ValueError that says what is wrong.

    Every length is checked before anything is read or allocated for it: a hostile file costs no memory.
    """
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ValueError(f"{size} bytes are too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"the header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
    if length > size - 8:
        raise ValueError(f"the header claims {length} bytes, and the file has {size}")
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=without_duplicates)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"the header is no JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    header.pop("__metadata__", None)
    return _checked(header, size - 8 - length)


def _checked(header: Mapping[str, Any], data_bytes: int) -> dict[str, HeaderEntry]:
    entries: dict[str, HeaderEntry] = {}
    spans: list[tuple[int, int]] = []
    for key, value in header.items():
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"tensor {key[:80]!r} has not exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise ValueError(f"tensor {key[:80]!r} has the number format {str(dtype)[:40]!r}, which is not allowed")
        if not is_counts(shape) or not is_counts(offsets) or len(offsets) != 2:
            raise ValueError(f"the shape or data_offsets of tensor {key[:80]!r} are not whole numbers from 0")
        entry = HeaderEntry(dtype, tuple(shape))
        if offsets[1] - offsets[0] != entry.num_bytes or offsets[1] > data_bytes:
            raise ValueError(f"tensor {key[:80]!r} at bytes {offsets} does not fit its shape {shape} or the file")
        entries[key] = entry
        spans.append((offsets[0], offsets[1]))
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise ValueError(f"the tensors leave a gap or overlap at byte {position}")
        position = end
    if position != data_bytes:
        raise ValueError(f"the tensors take {position} bytes, and the file has {data_bytes} behind its header")
    return entries


def is_counts(value: Any) -> bool:
    """Whether `value` is a short list of whole numbers from 0 that fit 63 bits (True is no number here)."""
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(type(item) is int and 0 <= item < 2**63 for item in value)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: a key given twice is an error; two readers could each take another one."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is given twice")
    return value
