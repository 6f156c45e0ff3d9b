"""A fully trained model as files that plain transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from fleetune.models.stored import write_weights
from fleetune.spec.safetensors_header import SINGLE_FILE


def save_full(
    module: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    *,
    source: Path,
    shapes: Mapping[str, tuple[int, ...]],
) -> set[str]:
    """Write weights in fp32 and the source folder's config into `folder`; returns the names in the file.

    tensors: every parameter by its name, a tied one once; shapes: their whole shapes. Buffers that belong to a checkpoint are
    the module's own.
    """
    kept = set(module.state_dict(keep_vars=True))
    buffers = {name: value for name, value in module.named_buffers() if name in kept and value.is_floating_point()}
    shapes = {**shapes, **{name: tuple(value.shape) for name, value in buffers.items()}}
    folder.mkdir(parents=True, exist_ok=True)

    def everything() -> Iterable[tuple[str, torch.Tensor]]:
        yield from tensors
        yield from buffers.items()

    write_weights(folder / SINGLE_FILE, shapes, everything(), torch.float32)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in ("generation_config.json", *(path.name for path in source.glob("*.py"))):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return set(shapes)
