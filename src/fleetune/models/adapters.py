"""Adding, loading and saving adapters in PEFT's format.

The layers are ours (`lora.py`); the format, the names in files and the results are PEFT's, which tests and the check of
an export prove with PEFT itself. PEFT is not imported here: its import costs more than building the model.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleetune.models.anatomy import is_conv1d
from fleetune.models.causal import CausalModel
from fleetune.models.lora import AdapterKind, AdapterSettings, LoraLinear
from fleetune.spec.errors import raise_if_any

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
#: PEFT stores names as they are within its own wrapper.
_STORED_PREFIX = "base_model.model."
_WEIGHTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


def add_adapter(
    model: CausalModel,
    *,
    adapter: AdapterKind,
    rank: int,
    alpha: float,
    dropout: float,
    targets: tuple[str, ...],
    seed: int,
) -> CausalModel:
    """Freeze the model and put a new adapter in; returns the same model.

    targets: names of linear layers within the blocks (`q_proj`, or more of the path); empty: all of them. New weights
    are a function of (seed, name), the same on every rank. Raises UserError for targets that name nothing.
    """
    chosen = find_targets(model, targets)
    conv1ds = [is_conv1d(model.module.get_submodule(name)) for name in chosen]
    settings = AdapterSettings(adapter, rank, alpha, dropout, chosen, transposed=any(conv1ds))
    return _insert(model, settings, seed)


def find_targets(model: CausalModel, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Full names of the linear layers in the blocks that `targets` name, in the model's order. Raises UserError."""
    within = model.anatomy.linears
    modules = dict(model.module.named_modules())
    there = [f"{block}.{name}" for block in model.anatomy.block_names() for name in within if f"{block}.{name}" in modules]
    if not targets:
        return tuple(there)
    named = {target: [name for name in there if f".{name}".endswith(f".{target}")] for target in targets}
    raise_if_any([_unmatched(model, target) for target, found in named.items() if not found])
    chosen = {name for found in named.values() for name in found}
    return tuple(name for name in there if name in chosen)


def _unmatched(model: CausalModel, target: str) -> str:
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in model.anatomy.linears))
    near = difflib.get_close_matches(target, [*known, *model.anatomy.linears], n=1)
    why = "names no linear layer of the model's blocks"
    if target.rpartition(".")[2] == model.anatomy.head.rpartition(".")[2]:
        why = "is the head, which an adapter leaves as it is"
    elif any(target in name for name in model.anatomy.experts):
        why = "is a stack of experts, which has no linear layer to put an adapter in"
    hint = f"did you mean {near[0]}? " if near else ""
    return f"lora_targets {target} {why}: {hint}give some of {', '.join(known)}, or nothing for all of them"


def _insert(model: CausalModel, settings: AdapterSettings, seed: int) -> CausalModel:
    if model.adapter is not None:
        raise ValueError("the model has an adapter already")
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)
    for name in settings.targets:
        path, _, leaf = name.rpartition(".")
        owner = model.module.get_submodule(path)
        layer = LoraLinear(getattr(owner, leaf), name, settings, seed, model.randomness)
        setattr(owner, leaf, layer.train(owner.training))
    model.adapter = settings
    return model


def adapter_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by their names in the model."""
    return {name: parameter for name, parameter in module.named_parameters() if name.endswith(_WEIGHTS)}


def save_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, settings: AdapterSettings, *, base_model_name: str
) -> None:
    """Write an adapter that plain PEFT loads. tensors: (name in the model, values), whole, of every adapter weight.

    base_model_name: where the base model is found again (a hub id, or a folder); it goes into the config as it is.
    One process calls it. Raises ValueError when a weight is absent, empty or not finite: such a file is never written.
    """
    from safetensors.torch import save_file

    stored = {_STORED_PREFIX + name: value.detach().to("cpu").contiguous() for name, value in tensors}
    wanted = {_STORED_PREFIX + name for name in stored_names(settings)}
    wrong = sorted(wanted ^ set(stored)) + [name for name, value in stored.items() if not _sound(value)]
    if wrong:
        raise ValueError(f"the adapter is not whole or not finite: {', '.join(wrong[:5])}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = peft_config(settings, base_model_name)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sound(value: torch.Tensor) -> bool:
    return value.numel() > 0 and bool(torch.isfinite(value).all())


def stored_names(settings: AdapterSettings) -> list[str]:
    """The model's names of every weight of an adapter."""
    kinds = _WEIGHTS if settings.kind == "dora" else _WEIGHTS[:2]
    return [f"{target}.{kind}" for target in settings.targets for kind in kinds]


def peft_config(settings: AdapterSettings, base_model_name: str) -> dict[str, Any]:
    """The content of PEFT's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted(settings.targets),
        "use_rslora": settings.kind == "rslora",
        "use_dora": settings.kind == "dora",
        "fan_in_fan_out": settings.transposed,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": dict(settings.ranks),
        "alpha_pattern": dict(settings.alphas),
    }
