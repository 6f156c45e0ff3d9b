"""Rows in chunks that stay in a core's cache while several element-wise operations pass over them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Elements of a chunk: half a megabyte in fp32. On a CPU with 2 MB of second-level cache, the backward of a norm over
#: [1024, 576] took a third of the time that it took in one piece, and that of a gated product half.
_ELEMENTS = 1 << 17


def row_chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Slices of the first dim of [T, width]; one for all where the device is no CPU."""
    size = max(1, _ELEMENTS // max(1, rows.shape[1])) if rows.device.type == "cpu" else max(1, len(rows))
    for start in range(0, len(rows), size):
        yield slice(start, start + size)
