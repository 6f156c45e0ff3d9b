"""Merging an adapter into its base model's weights, one tensor at a time, with PEFT's results to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fleetune.models.anatomy import is_conv1d
from fleetune.models.lora import AdapterSettings
from fleetune.models.quantized_files import QuantizedWeights
from fleetune.models.stored import StoredWeights, naming
from fleetune.spec.errors import UserError


def merged_tensors(
    folder: Path,
    adapter: Mapping[str, torch.Tensor],
    settings: AdapterSettings,
    *,
    dtype: torch.dtype | None = None,
    allow_remote_code: bool = False,
    quantized: Path | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(stored name, tensor) of every weight of a model folder, the adapted ones merged, in `dtype` (None: their stored one).

    Names are those of the folder's files, so that its config.json fits as it is and what is tied stays tied.
    adapter: every weight of the adapter by its name in the model. quantized: the quantised weights that it was trained on;
    then those, dequantised, are what it is merged into, and what the layers without an adapter get: together they are the
    model that was trained, and the original weights with this adapter are another. Raises UserError when an adapted layer
    is not there.
    """
    from fleetune.models.build import empty_module

    stored = StoredWeights.open(folder)
    module = empty_module(folder, dtype=torch.float32, allow_remote_code=allow_remote_code)
    name_of = naming(module)
    base = None if quantized is None else QuantizedWeights.open(quantized)
    left = {*settings.targets, *(base.layers if base else ())}
    for stored_name, tensor in stored.tensors():
        target = name_of(stored_name)[0].removesuffix(".weight")
        if base is not None and stored_name.endswith(".weight") and target in base.layers:
            weight = base.dense(target, dtype or tensor.dtype)
            tensor = weight.t().contiguous() if is_conv1d(module.get_submodule(target)) else weight
        if target in left:
            left.discard(target)
            if target in settings.targets:
                tensor = merge(tensor, target, adapter, settings, dtype=dtype)
        yield stored_name, tensor
    if left:
        raise UserError(
            f"{folder} has no weights {', '.join(sorted(left)[:3])}, which the adapter adapts: give its own base model"
        )


def merge(
    weight: torch.Tensor,
    target: str,
    adapter: Mapping[str, torch.Tensor],
    settings: AdapterSettings,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The weight of one layer with its adapter merged in; [out, in] (or [in, out] where transposed), in `dtype` or its own.

    The sum is made in fp32 and rounded once. DoRA: m * (W + d) / |W + d|, norms over rows.
    """
    a, b = (adapter[f"{target}.{name}.weight"].detach().float() for name in ("lora_A", "lora_B"))
    change = b.to(weight.device) @ a.to(weight.device)
    if settings.transposed:
        change = change.t()
    merged = weight.float() + change * settings.scale_of(target)
    if settings.kind == "dora":
        norms = torch.linalg.vector_norm(merged, dim=0 if settings.transposed else 1)
        factor = adapter[f"{target}.lora_magnitude_vector"].detach().float().to(weight.device) / norms
        merged = merged * (factor[None, :] if settings.transposed else factor[:, None])
    return merged.to(dtype or weight.dtype).contiguous()
