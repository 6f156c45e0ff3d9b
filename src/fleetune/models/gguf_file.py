"""A GGUF file read as bytes: its metadata and where its tensors lie. No torch.

The format (v2, v3, little-endian): magic, version, two counts, key-value pairs, tensor descriptions, padding, data. Every
length in it is a stranger's claim and is checked against the file before it is believed. The gguf package reads the same,
but one string at a time into arrays: 7 s for the vocabulary of a small model, against 0.3 s here.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.spec.errors import UserError

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _UINT32, _F32 = 8, 9, 4, 0
_MAX_PAIRS, _MAX_TENSORS, _MAX_DIMS = 1 << 16, 1 << 20, 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: number of its ggml type, shape in torch's order, and its first byte, counted from the start of the data."""

    kind: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says. pairs: the bytes of each key-value pair, as they are in the file. data_start: of all tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    pairs: dict[str, bytes]
    data_start: int

    @staticmethod
    def read(path: Path) -> GgufFile:
        """Read the header. Raises UserError for what is no GGUF, another version, or damaged."""
        cursor = _Cursor(path)
        try:
            return _read(path, cursor)
        except (struct.error, IndexError, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise UserError(f"{path} is damaged near byte {cursor.at:,} ({error}): download the file again") from error

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def number(self, key: str) -> Any:
        """A value of the architecture's own section (`llama.block_count` is `block_count`), or None."""
        return self.metadata.get(f"{self.architecture}.{key}")

    @cached_property
    def _bytes(self) -> np.ndarray:
        return np.memmap(self.path, dtype=np.uint8, mode="r")

    def values(self, name: str) -> np.ndarray:
        """The tensor as fp32 in torch's shape; a private copy. Raises UserError for a type that cannot be read."""
        gguf = import_gguf()
        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        start = self.data_start + tensor.offset
        num_elements = math.prod(tensor.shape)
        end = start + num_elements // block * block_bytes
        if num_elements % block or end > self._bytes.shape[0]:
            raise UserError(f"{self.path} is damaged: {name} reaches beyond the end of the file: download the file again")
        raw = self._bytes[start:end]
        try:
            if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
                return (
                    raw.view(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16)
                    .astype(np.float32)
                    .reshape(tensor.shape)
                )
            rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
            return gguf.quants.dequantize(rows, kind).astype(np.float32, copy=False).reshape(tensor.shape)
        except (NotImplementedError, ValueError) as error:
            raise UserError(
                f"{self.path} stores {name} as {kind.name}, which the gguf package cannot read back: give a file quantised as "
                "Q8_0, Q6_K, Q5_K, Q4_K, Q4_1, Q4_0, F16 or BF16"
            ) from error

    def skeleton(self) -> bytes:
        """The file without vocabulary and weights: a valid GGUF of a few kB that says the same of the model's shape.

        Readers that parse string arrays in Python take seconds for the whole file, and nothing for this.
        """
        kept = [pair for key, pair in self.pairs.items() if not isinstance(self.metadata[key], list)]
        infos = [
            struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<IQIQ", 1, 1, _F32, 0) for name in self.tensors
        ]
        head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(kept)) + b"".join(kept) + b"".join(infos)
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        return head + b"\0" * (-len(head) % alignment) + b"\0" * alignment


def import_gguf() -> Any:
    """The gguf package, which knows the quantised formats. Raises UserError naming the extra."""
    try:
        import gguf
    except ImportError as error:
        raise UserError("reading a .gguf file needs the gguf package: run `pip install 'fleetune[gguf]'`") from error
    return gguf


class _Cursor:
    """A place in the bytes of a file. Reading past the end raises IndexError or struct.error."""

    def __init__(self, path: Path) -> None:
        import mmap

        with open(path, "rb") as file:
            try:
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise UserError(f"{path} is empty: download the file again") from error
        self.at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.bytes, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        if length > len(self.bytes) - self.at:
            raise IndexError(f"a text of {length:,} bytes")
        raw = self.bytes[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])[0]
        inner, count = self.take("IQ")
        if count > len(self.bytes) - self.at:
            raise IndexError(f"a list of {count:,} values")
        if inner == _STRING:
            return [self.text() for _ in range(count)]
        if inner == _ARRAY:
            raise KeyError("lists of lists")
        return list(self.take(f"{count}{_SCALARS[inner]}"))


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.bytes[:4] != b"GGUF":
        raise UserError(f"{path} is no GGUF file: give one, or a model folder")
    _, version, num_tensors, num_pairs = cursor.take("IIQQ")
    if version not in _VERSIONS:
        raise UserError(f"{path} is GGUF version {version} (or big-endian), and {_VERSIONS} are read: convert it again")
    if num_pairs > _MAX_PAIRS or num_tensors > _MAX_TENSORS:
        raise IndexError(f"{num_pairs:,} keys and {num_tensors:,} tensors")
    metadata: dict[str, Any] = {}
    pairs: dict[str, bytes] = {}
    for _ in range(num_pairs):
        start = cursor.at
        key = cursor.text()
        metadata[key] = cursor.value(cursor.take("I")[0])
        pairs[key] = cursor.bytes[start : cursor.at]
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UserError(f"{path} is one of {parts} parts: join them first (llama-gguf-split --merge), and give the whole")
    if not isinstance(metadata.get("general.architecture"), str):
        raise UserError(f"{path} does not say which architecture it is (general.architecture): give another file")
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        (num_dims,) = cursor.take("I")
        if num_dims > _MAX_DIMS or name in tensors:
            raise IndexError(f"the tensor {name!r}")
        dims = cursor.take(f"{num_dims}Q")
        kind, offset = cursor.take("IQ")
        if math.prod(dims) > len(cursor.bytes) * 64 or offset > len(cursor.bytes):
            raise IndexError(f"the tensor {name!r} of shape {dims}")
        tensors[name] = GgufTensor(kind, tuple(reversed(dims)), offset)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20:
        raise IndexError(f"an alignment of {alignment!r}")
    return GgufFile(path, metadata, tensors, pairs, cursor.at + -cursor.at % alignment)
