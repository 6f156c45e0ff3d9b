"""Merging an adapter into its base model's weights, one tensor at a time, with PEFT's results to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from fleetune.models.anatomy import is_conv1d
from fleetune.models.lora import AdapterSettings
from fleetune.models.origins import find_origins
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
    places = _places(module, stored) if settings.stacks else {}
    left = {*settings.targets, *settings.stacks, *(base.layers if base else ())}
    for stored_name, tensor in stored.tensors():
        name = name_of(stored_name)[0]
        target = name.removesuffix(".weight")
        if base is not None and stored_name.endswith(".weight") and target in base.layers:
            weight = base.dense(target, dtype or tensor.dtype)
            tensor = weight.t().contiguous() if is_conv1d(module.get_submodule(target)) else weight
        if name in settings.stacks:
            left.discard(name)
            change = _change_of_experts(module, name, adapter, settings, places[stored_name])
            tensor = (tensor.float() + change[: tensor.shape[0]].to(tensor.device)).to(dtype or tensor.dtype).contiguous()
        elif target in left:
            left.discard(target)
            if target in settings.targets:
                tensor = merge(tensor, target, adapter, settings, dtype=dtype)
        yield stored_name, tensor
    if left:
        raise UserError(
            f"{folder} has no weights {', '.join(sorted(left)[:3])}, which the adapter adapts: give its own base model"
        )


def _places(module: nn.Module, stored: StoredWeights) -> dict[str, tuple[int, int] | None]:
    """Stored name -> (expert, first row within it) of what is stored one by one; None where a stack is stored whole."""
    shapes = dict(stored.shapes())
    found: dict[str, tuple[int, int] | None] = {}
    for origin in find_origins(module, stored)[0].values():
        row = 0
        for part in origin.parts:
            found |= {name: None if origin.is_whole else (expert, row) for expert, name in enumerate(part)}
            row += shapes[part[0]][0]
    return found


def _change_of_experts(
    module: nn.Module,
    stack: str,
    adapter: Mapping[str, torch.Tensor],
    settings: AdapterSettings,
    place: tuple[int, int] | None,
) -> torch.Tensor:
    """What is added to a stored stack, fp32: to all of it, or to one expert from a row on."""
    a, b = (adapter[f"{stack}_lora.{kind}.weight"].detach().float() for kind in ("lora_A", "lora_B"))
    rank = settings.rank_of(stack)
    experts = a.shape[0] // rank
    a, b = a.view(experts, rank, -1), b.view(b.shape[0], rank, experts).permute(2, 0, 1) * settings.scale_of(stack)
    if place is not None:
        return b[place[0], place[1] :] @ a[place[0]]
    change = torch.bmm(b, a)
    owner = module.get_submodule(stack.rpartition(".")[0])
    return change.mT if getattr(owner, "is_transposed", False) else change


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
