"""Weights as they lie in a model folder: safetensors files, memory-mapped, and the names they have there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleetune.models.quantized_linear import quantized_layers
from fleetune.spec.safetensors_header import read_header, weight_files

#: stored name -> (name in the model, needs converting).
Naming = Callable[[str], tuple[str, bool]]
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model folder. files: stored name -> file."""

    folder: Path
    files: dict[str, Path]

    @staticmethod
    def open(folder: Path) -> StoredWeights:
        """Read the names. Raises UserError when the folder has no safetensors, or an index that points elsewhere."""
        return StoredWeights(folder, {name: path for path in weight_files(folder) for name in read_header(path)})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(stored name, tensor) file by file. On the CPU and memory-mapped: reading pages in, copies nothing.

        A tensor stays valid after the file is closed. Writing into one would make a private copy of its pages: never do.
        """
        from safetensors import safe_open

        for path in dict.fromkeys(self.files.values()):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors handle is no dict)
                    if self.files.get(name) == path:
                        yield name, file.get_tensor(name)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(stored name, shape) of every tensor, from the headers."""
        for path in dict.fromkeys(self.files.values()):
            for name, tensor in read_header(path).items():
                yield name, tensor.shape


def write_weights(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Write one safetensors file tensor by tensor, each in `dtype`, holding one at a time in memory.

    shapes: every name that comes, with its whole shape; the tensors may come in any order. Raises ValueError when one
    comes twice, not at all, in another shape, or with a value that is not finite: the file is then worthless.
    """
    size = dtype.itemsize
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, shape in shapes.items():
        offsets[name] = (end, end + math.prod(shape) * size)
        end = offsets[name][1]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": list(offsets[name])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    left = set(shapes)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            if name not in left or tuple(tensor.shape) != tuple(shapes[name]) or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} of shape {tuple(tensor.shape)} comes unasked, twice, misshaped or not finite")
            left.discard(name)
            file.seek(8 + len(text) + offsets[name][0])
            values = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
            file.write(values.reshape(-1).view(torch.uint8).numpy().data)
    if left:
        raise ValueError(f"these weights did not come: {', '.join(sorted(left)[:5])}")


def naming(model: nn.Module) -> Naming:
    """How transformers reads a stored name for `model`: stored name -> (name in the model, needs converting).

    Most names are the model's own, with or without the prefix of its body. Older checkpoints differ by renamings that
    transformers knows. What it joins, splits or transposes while reading is said to need converting.
    """
    expected = _state(model).keys()
    prefix = getattr(model, "base_model_prefix", "")
    known: list[Any] = []

    def name_of(stored: str) -> tuple[str, bool]:
        for name in (stored, f"{prefix}.{stored}", stored.removeprefix(f"{prefix}.")):
            if name in expected:
                return name, False
        if not known:
            known.append(_conversions(model))
        return known[0](stored)

    return name_of


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the model's weights are called, those that rest quantised too."""
    state = dict(model.state_dict(keep_vars=True))
    return {**state, **{f"{name}.weight": layer.parts()["codes"] for name, layer in quantized_layers(model).items()}}


def _conversions(model: nn.Module) -> Naming:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = _state(model)

    def name_of(stored: str) -> tuple[str, bool]:
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, state)
        return name, pattern is not None

    return name_of
