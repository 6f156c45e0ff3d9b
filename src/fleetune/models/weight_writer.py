"""Writing a safetensors file one tensor at a time: memory holds one tensor, however large the model is."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetune.spec.errors import UserError

if TYPE_CHECKING:
    import torch

#: Our names of number formats -> torch's and safetensors'.
PRECISIONS = {"fp32": ("float32", "F32"), "bf16": ("bfloat16", "BF16"), "fp16": ("float16", "F16")}
_STORED_AS = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written. dtype: torch's name of it, without `torch.`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _STORED_AS[self.dtype][1]


def write_weights(path: Path, planned: Sequence[Planned], read: Callable[[str], torch.Tensor]) -> None:
    """Write `planned` tensors, each fetched by `read(name)` when its turn comes and converted to its planned dtype.

    The wider formats come first, so that every tensor is aligned for memory-mapping. The file is synced to the disk.
    Raises UserError where a finite value becomes infinite in the narrower format.
    """
    import torch

    ordered = sorted(planned, key=lambda tensor: (-_STORED_AS[tensor.dtype][1], tensor.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        stored_as = _STORED_AS[tensor.dtype][0]
        header[tensor.name] = {
            "dtype": stored_as,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            values = _converted(read(tensor.name), getattr(torch, tensor.dtype), tensor.name)
            if tuple(values.shape) != tensor.shape:
                raise ValueError(f"{tensor.name} has shape {tuple(values.shape)}, planned was {tensor.shape}")
            file.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())


def _converted(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    import torch

    made = values.to(dtype).contiguous()
    if dtype == torch.float16 and values.dtype != dtype and bool(((made.isinf()) & ~values.isinf()).any()):
        raise UserError(
            f"the weight {name} holds {values.abs().max():.3g}, and fp16 ends at 65504: give --precision bf16 or fp32"
        )
    return made
