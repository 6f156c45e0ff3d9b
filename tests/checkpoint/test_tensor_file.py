from __future__ import annotations

import io
from pathlib import Path

import torch

from fleetune.checkpoint.tensor_file import DTYPE_BYTES, DTYPE_OF_TORCH, HeaderEntry, header_bytes
from fleetune.spec.safetensors_header import parse_header


def test_a_file_of_every_number_format_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = {name: torch.arange(6).to(getattr(torch, name)) for name in DTYPE_OF_TORCH}
    entries = [(name, HeaderEntry(DTYPE_OF_TORCH[name], (6,))) for name in tensors]
    content = header_bytes(entries) + b"".join(bytes(tensor.view(torch.uint8).numpy()) for tensor in tensors.values())
    (tmp_path / "all.safetensors").write_bytes(content)
    with safe_open(str(tmp_path / "all.safetensors"), "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert file.get_tensor(name).dtype == tensor.dtype
            assert torch.equal(file.get_tensor(name).float(), tensor.float())
    read = parse_header(io.BytesIO(content), len(content))
    assert {name: HeaderEntry(tensor.dtype, tensor.shape) for name, tensor in read.items()} == dict(entries)
    assert all(getattr(torch, name).itemsize == DTYPE_BYTES[dtype] for name, dtype in DTYPE_OF_TORCH.items())
