"""A tensor as a weights file describes it. Nothing here reads a value of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: safetensors dtypes that hold numbers of a model: name -> bytes per value (the rest are masks, indices or packed values).
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
OTHER_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E8M0": 1}
VALUE_BYTES = {**FLOAT_BYTES, **OTHER_BYTES}

#: Values a tensor or a dim may have: beyond it a header is not honest.
MAX_VALUES = 1 << 50


@dataclass(frozen=True)
class StoredTensor:
    """shape: as transformers has it, [out, in] for a linear layer. dtype: as the file names it.

    num_bytes: in the file, from the byte `start` of it.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)
