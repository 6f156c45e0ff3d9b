"""Adapters as files, in PEFT's format: `adapter_config.json` beside `adapter_model.safetensors`.

The layers are ours (`lora.py`); format, names and results are PEFT's, which tests and the check of an export prove with
PEFT itself. PEFT is not imported here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fleetune.models.lora import AdapterSettings, weight_names
from fleetune.spec.errors import UserError, raise_if_any

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
#: PEFT stores names as they are within its own wrapper.
_PREFIX = "base_model.model."
#: Keys of PEFT's config that are understood here, or that change nothing about what an adapter computes.
_UNDERSTOOD = frozenset(
    {
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "auto_mapping",
        "inference_mode",
        "r",
        "lora_alpha",
        "lora_dropout",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "use_rslora",
        "use_dora",
        "fan_in_fan_out",
        "bias",
        "init_lora_weights",
        "rank_pattern",
        "alpha_pattern",
        "qalora_group_size",
        "megatron_core",
        "runtime_config",
        "ensure_weight_tying",
    }
)
#: Initialisations that leave the base weights alone; the others store what a changed base needs.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
#: target, and the weight's name beside its base layer's; older versions of PEFT put `.weight` behind a magnitude.
_WEIGHT = re.compile(rf"(?:{re.escape(_PREFIX)})?(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)(?:\.weight)?")


@dataclass(frozen=True)
class SavedAdapter:
    """stacks: those targets that are stacks of experts, as PEFT names them. parameters: names or endings of the stacks.
    tensors: (target, name of the weight beside the base layer's) -> values on the CPU, fp32."""

    settings: AdapterSettings
    tensors: dict[tuple[str, str], torch.Tensor]
    stacks: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


def save_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, settings: AdapterSettings, *, base_model_name: str
) -> set[str]:
    """Write an adapter that plain PEFT loads; returns the names in the file.

    tensors: (name in the model, values), whole, of every weight of the adapter. base_model_name: where the base model is
    found again (a hub id, or a folder); it goes into the config as it is. One process calls it. Raises ValueError when
    a weight is absent, empty or not finite: such a file is never written.
    """
    from safetensors.torch import save_file

    in_file = file_names(settings)
    stored = {_PREFIX + in_file.get(name, name): value.detach().to("cpu").contiguous() for name, value in tensors}
    wanted = {_PREFIX + in_file[name] for name in settings.weight_names()}
    wrong = sorted(wanted ^ set(stored)) + [name for name, value in stored.items() if not _is_sound(value)]
    if wrong:
        raise ValueError(f"the adapter is not whole or not finite: {', '.join(wrong[:5])}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(peft_config(settings, base_model_name), indent=2, ensure_ascii=False)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    return set(stored)


def file_names(settings: AdapterSettings) -> dict[str, str]:
    """Name in the model -> in PEFT's file, without its prefix. Of several stacks of a module the last one is outermost."""
    names = {name: name for name in settings.weight_names()}
    owners = [stack.rpartition(".")[0] for stack in settings.stacks]
    for number, (stack, owner) in enumerate(zip(settings.stacks, owners)):
        wrapped = owner + ".base_layer" * owners[number + 1 :].count(owner)
        names |= {f"{stack}_lora.{kind}": f"{wrapped}.{kind}" for kind in weight_names("lora")}
    return names


def _is_sound(value: torch.Tensor) -> bool:
    return value.numel() > 0 and bool(torch.isfinite(value).all())


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
        "target_modules": sorted(settings.short_targets or settings.targets) or None,
        "target_parameters": sorted(settings.stacks) or None,
        "use_rslora": settings.kind == "rslora",
        "use_dora": settings.kind == "dora",
        "fan_in_fan_out": settings.transposed,
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {re.escape(name): rank for name, rank in settings.ranks},
        "alpha_pattern": {re.escape(name): alpha for name, alpha in settings.alphas},
    }


def read_adapter(folder: Path) -> SavedAdapter:
    """Read an adapter of PEFT's or of ours. Raises UserError for what is no LoRA, or does more than LoRA."""
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    parameters = tuple(config.get("target_parameters") or ())
    every = tuple(dict.fromkeys(target for target, _ in tensors))
    stacks = tuple(target for target in every if _holds_stack(target, parameters))
    targets = tuple(target for target in every if target not in stacks)
    absent = [f"{t}.{name}" for t in targets for name in weight_names(kind) if (t, name) not in tensors]  # type: ignore[arg-type]
    absent += [f"{t}.{name}" for t in stacks for name in weight_names("lora") if (t, name) not in tensors]
    if absent or not every:
        raise UserError(f"the adapter {folder} lacks {', '.join(absent[:3]) or 'every weight'}: save or download it again")
    rank, alpha = int(config.get("r", 8)), float(config.get("lora_alpha", 8))
    ranks = {target: int(tensors[target, "lora_A.weight"].shape[0]) for target in targets}
    alphas = {target: _by_pattern(config.get("alpha_pattern") or {}, target, alpha) for target in targets}
    settings = AdapterSettings(
        kind=kind,  # type: ignore[arg-type]
        rank=rank,
        alpha=alpha,
        dropout=float(config.get("lora_dropout") or 0.0),
        targets=targets,
        transposed=bool(config.get("fan_in_fan_out")),
        ranks=tuple((target, own) for target, own in ranks.items() if own != rank),
        alphas=tuple((target, own) for target, own in alphas.items() if own != alpha),
    )
    return SavedAdapter(settings, tensors, stacks, parameters)


def _holds_stack(target: str, parameters: tuple[str, ...]) -> bool:
    """Whether a target in the file is the module of one of the stacked parameters, wrapped or not."""
    owner = target.replace(".base_layer", "")
    return any(f".{owner}".endswith(f".{wanted.rpartition('.')[0]}") for wanted in parameters)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {CONFIG_FILE}: give the folder of an adapter in PEFT's format") from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): save or download the adapter again") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        found = config.get("peft_type") if isinstance(config, dict) else None
        raise UserError(f"{path} describes an adapter of type {found}: only LORA adapters (lora, dora, rslora) can be used")
    more = [key for key, value in config.items() if value and key not in _UNDERSTOOD]
    if config.get("bias", "none") != "none":
        more.append("bias")
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        more.append("init_lora_weights")
    raise_if_any(
        [
            f"{path} asks for {key} = {json.dumps(config[key])[:80]}, which changes more than low-rank layers can: merge the "
            "adapter into its base model with PEFT, and give the merged model"
            for key in more
        ]
    )
    return config


def _read_tensors(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    from safetensors import safe_open

    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} has no {WEIGHTS_FILE}: save the adapter with PEFT as safetensors (pickled .bin files are never read)"
        )
    tensors = {}
    strange = []
    with safe_open(path, framework="pt") as file:
        for stored in file.keys():  # noqa: SIM118 (a safetensors handle is no dict)
            match = _WEIGHT.fullmatch(stored)
            if match is None:
                strange.append(stored)
            else:
                tensors[match[1], match[2]] = file.get_tensor(stored).float()
    if strange:
        raise UserError(
            f"{path} holds {', '.join(strange[:3])}, which is no part of a low-rank layer: merge the adapter into its base "
            "model with PEFT, and give the merged model"
        )
    return tensors


def _by_pattern(patterns: dict[str, float], target: str, otherwise: float) -> float:
    """PEFT's rule: the first pattern that matches the end of the name."""
    return next((float(value) for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", target)), otherwise)
