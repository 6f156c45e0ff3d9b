"""A GGUF file with its vocabulary and its weights; its header is read by `spec.gguf_header`. No torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.spec.errors import UserError
from fleetune.spec.gguf_header import GgufHeader, read_gguf
from fleetune.spec.stored_tensor import StoredTensor

_F32 = 0  # number of the ggml type


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says, all lists included."""

    path: Path
    header: GgufHeader

    @staticmethod
    def read(path: Path) -> GgufFile:
        """Read the header. Raises UserError for what is no GGUF, another version, damaged, or of no architecture."""
        header = read_gguf(path, max_listed=None)
        if not isinstance(header.keys.get("general.architecture"), str):
            raise UserError(f"{path} does not say which architecture it is (general.architecture): give another file")
        return GgufFile(path, header)

    @property
    def metadata(self) -> dict[str, Any]:
        return self.header.keys

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.header.tensors

    @property
    def architecture(self) -> str:
        return self.header.architecture

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
        raw = self._bytes[tensor.start : tensor.end]
        if tensor.dtype in ("F32", "F16"):
            stored = raw.view(np.float32 if tensor.dtype == "F32" else np.float16)
            return stored.astype(np.float32).reshape(tensor.shape)
        try:
            kind = gguf.GGMLQuantizationType[tensor.dtype]
            rows = raw.reshape(*tensor.shape[:-1], -1)
            return gguf.quants.dequantize(rows, kind).astype(np.float32, copy=False).reshape(tensor.shape)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise UserError(
                f"{self.path} stores {name} as {tensor.dtype}, which the gguf package cannot read back: give a file quantised "
                "as Q8_0, Q6_K, Q5_K, Q4_K, Q4_1, Q4_0, F16 or BF16"
            ) from error

    def skeleton(self) -> bytes:
        """The file without vocabulary and weights: a valid GGUF of a few kB that says the same of the model's shape.

        Readers that parse string arrays in Python take seconds for the whole file, and nothing for this.
        """
        kept = [
            self._bytes[start:end].tobytes()
            for key, (start, end) in self.header.spans.items()
            if not isinstance(self.metadata[key], list)
        ]
        infos = [
            struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<IQIQ", 1, 1, _F32, 0) for name in self.tensors
        ]
        head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(kept)) + b"".join(kept) + b"".join(infos)
        alignment = self.header.alignment
        return head + b"\0" * (-len(head) % alignment) + b"\0" * alignment


def import_gguf() -> Any:
    """The gguf package, which knows the quantised formats. Raises UserError naming the extra."""
    try:
        import gguf
    except ImportError as error:
        raise UserError("reading a .gguf file needs the gguf package: run `pip install 'fleetune[gguf]'`") from error
    return gguf
