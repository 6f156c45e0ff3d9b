"""What a GGUF file says of its model, read from its header as bytes: bounded, without torch and without the gguf package,
which reads one string at a time into arrays: 7 s for the vocabulary of a small model, against 0.3 s here.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, little-endian: magic, version,
number of tensors, number of keys; keys (name, type, value); tensors (name, dims from the fastest, type, offset).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleetune.spec.errors import UserError
from fleetune.spec.stored_tensor import MAX_VALUES, StoredTensor

MAGIC = b"GGUF"
MAX_KEYS = 10_000
MAX_TENSORS = 1_000_000
MAX_NAME_BYTES = 1 << 16
MAX_DIMS = 8
MAX_ALIGNMENT = 1 << 20
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32
#: Longer lists (vocabularies, merges) are stepped over unless they are asked for; only how long they are is kept.
MAX_LISTED = 4096

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
#: ggml type -> (name, values in a block, bytes of a block).
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class ListLength:
    """A list that was stepped over."""

    length: int


@dataclass(frozen=True)
class GgufHeader:
    """keys: metadata, as numbers, text, lists or `ListLength`. tensors: by GGUF name, in order.

    spans: the bytes in the file of each key with its value, from and to.
    """

    keys: dict[str, Any]
    tensors: dict[str, StoredTensor]
    spans: dict[str, tuple[int, int]]

    @property
    def alignment(self) -> int:
        """What the data of the tensors begins at a multiple of."""
        return int(self.keys.get(_ALIGNMENT, _DEFAULT_ALIGNMENT))

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture", ""))

    def of_model(self, name: str) -> Any:
        """The key `<architecture>.<name>`, or None. A list with a value per layer gives its first."""
        value = self.keys.get(f"{self.architecture}.{name}")
        return (value[0] if value else None) if isinstance(value, list) else value


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF does."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path, *, max_listed: int | None = MAX_LISTED) -> GgufHeader:
    """The header of a GGUF file. max_listed: the longest list that is kept; None: every one is.

    Raises UserError: not a GGUF, damaged, one part of several.
    """
    try:
        with open(path, "rb") as file:
            if file.read(4) != MAGIC:
                raise UserError(f"{path} is no GGUF file (it does not begin with GGUF): give another file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Reader(path, data, max_listed).header()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    parts = header.keys.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UserError(f"{path} is one of {parts} parts: join them first (llama-gguf-split --merge), and give the whole")
    return header


class _Reader:
    """Steps through the bytes; every count and length is checked against what is left of the file."""

    def __init__(self, path: Path, data: mmap.mmap, max_listed: int | None) -> None:
        self.path = path
        self.data = data
        self.max_listed = len(data) if max_listed is None else max_listed
        self.at = 4
        self.data_bytes = 0

    def header(self) -> GgufHeader:
        version = self.number("<I")
        if version not in (2, 3):
            raise UserError(f"{self.path} is a GGUF of version {version}, and versions 2 and 3 are read: convert it again")
        num_tensors = self.count(MAX_TENSORS, "tensors")
        num_keys = self.count(MAX_KEYS, "keys")
        keys: dict[str, Any] = {}
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            start = self.at
            name = self.text()
            if name in keys:
                raise self.damaged(f"the key {name} stands twice")
            keys[name] = self.value(int(self.number("<I")))
            spans[name] = start, self.at
        tensors: dict[str, StoredTensor] = {}
        for _ in range(num_tensors):
            name, tensor = self.tensor()
            if name in tensors:
                raise self.damaged(f"the tensor {name} stands twice")
            tensors[name] = tensor
        alignment = keys.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
            raise self.damaged(f"it says that its data is aligned to {alignment!r}")
        data_start = self.at + -self.at % alignment
        if tensors and self.data_bytes > len(self.data) - data_start:
            raise self.damaged("a tensor ends behind the end of the file")
        placed = {name: replace(tensor, start=data_start + tensor.start) for name, tensor in tensors.items()}
        return GgufHeader(keys, placed, spans)

    def damaged(self, why: str) -> UserError:
        return UserError(f"{self.path} is damaged: {why}. Download it again")

    def need(self, num_bytes: int) -> None:
        if num_bytes > len(self.data) - self.at:
            raise self.damaged(f"it ends within its header, at byte {self.at:,}")

    def number(self, form: str) -> Any:
        size = struct.calcsize(form)
        self.need(size)
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return value

    def count(self, limit: int, what: str) -> int:
        number = int(self.number("<Q"))
        if number > limit:
            raise self.damaged(f"it says it has {number:,} {what}")
        return number

    def skip_text(self) -> None:
        length = int(self.number("<Q"))
        self.need(length)
        self.at += length

    def text(self, limit: int = MAX_NAME_BYTES) -> str:
        length = int(self.number("<Q"))
        if length > limit:
            raise self.damaged(f"a name of {length:,} bytes")
        self.need(length)
        try:
            text = self.data[self.at : self.at + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"the text at byte {self.at:,} is no UTF-8") from None
        self.at += length
        return text

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text(len(self.data))
        if kind == _ARRAY:
            return self.list_value()
        raise self.damaged(f"a value of the unknown type {kind}")

    def list_value(self) -> list[Any] | ListLength:
        kind, length = int(self.number("<I")), int(self.number("<Q"))
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            self.need(size * length)
            start, self.at = self.at, self.at + size * length
            if length > self.max_listed:
                return ListLength(length)
            return list(struct.unpack_from(f"<{length}{_SCALARS[kind][1]}", self.data, start))
        if kind != _STRING:
            raise self.damaged(f"a list of the type {kind}")
        self.need(8 * length)
        if length <= self.max_listed:
            return [self.text(len(self.data)) for _ in range(length)]
        for _ in range(length):
            self.skip_text()
        return ListLength(length)

    def tensor(self) -> tuple[str, StoredTensor]:
        name = self.text()
        num_dims = int(self.number("<I"))
        if num_dims > MAX_DIMS:
            raise self.damaged(f"the tensor {name} has {num_dims} dims")
        shape = tuple(int(self.number("<Q")) for _ in range(num_dims))[::-1]
        kind = int(self.number("<I"))
        offset = int(self.number("<Q"))
        if kind not in TYPES:
            raise UserError(f"{self.path} holds {name} in the unknown format {kind}: give another quantisation of the model")
        dtype, block, block_bytes = TYPES[kind]
        values = math.prod(shape)
        if values > MAX_VALUES or values % block:
            raise self.damaged(f"the tensor {name} has shape {list(shape)} in {dtype}")
        num_bytes = values // block * block_bytes
        self.data_bytes = max(self.data_bytes, offset + num_bytes)
        return name, StoredTensor(shape, dtype, num_bytes, offset)  # from the start of the data, which comes behind
