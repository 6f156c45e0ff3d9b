"""A model folder becomes a `CausalModel` on one device.

transformers' class is built without weights (parameters on the meta device, buffers for real) and the stored tensors are
put in. On the CPU, frozen weights stay what they are in the file: memory-mapped pages, shared by all processes of a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleetune.models.anatomy import Anatomy
from fleetune.models.blocks import prepare_blocks
from fleetune.models.causal import CausalModel
from fleetune.models.config import load_config
from fleetune.models.dropout import Randomness
from fleetune.models.part import keep_part
from fleetune.models.probe import probe
from fleetune.models.quantized_files import QuantizedWeights, place_quantized
from fleetune.models.quantized_linear import quantized_layers
from fleetune.models.stored import Naming, StoredWeights, naming
from fleetune.spec.errors import UserError
from fleetune.spec.stages import Stage

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMED_AT_MOST = 5


def load_model(
    folder: Path | str,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    trainable: bool,
    allow_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    seed: int = 0,
    quantized: Path | None = None,
    stage: Stage | None = None,
    fast: bool = True,
) -> CausalModel:
    """Load a model folder (config.json and safetensors). One process, no collective.

    dtype: of the forward pass, or the name of a precision (fp32, bf16, fp16). Frozen weights (`trainable` false: an
    adapter, evaluation) are held in it; stored in it on the CPU they are memory-mapped, else converted, one private copy
    per process. Trained weights are fp32 masters whatever `dtype` is. seed: of the dropouts. quantized: a folder of
    `prepare_quantized`, whose weights take the places of the linear layers'. stage: keep the weights of one stage only (see
    `part.py`); the others are mapped while the model is probed, and never copied. fast: see `CausalModel`. Raises UserError
    naming every missing, unexpected or mis-shaped weight.
    """
    dtype = PRECISIONS[dtype] if isinstance(dtype, str) else dtype
    folder, device = Path(folder), torch.device(device)
    at_first = device if stage is None else torch.device("cpu")
    module = read_module(
        folder,
        dtype=torch.float32 if trainable else dtype,
        device=at_first,
        trainable=trainable and stage is None,
        allow_remote_code=allow_remote_code,
        quantized=quantized,
    )
    anatomy = Anatomy.of(module)
    traits = probe(module, anatomy, at_first)
    randomness = Randomness(seed)
    model = CausalModel(
        module, anatomy, traits, compute_dtype=dtype, device=at_first, randomness=randomness, folder=folder, fast=fast
    )
    prepare_blocks(model, gradient_checkpointing=gradient_checkpointing)
    if stage is not None:
        keep_part(model, stage, device=device, trainable=trainable)
    return model


def read_module(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trainable: bool,
    allow_remote_code: bool = False,
    quantized: Path | None = None,
) -> nn.Module:
    """The transformers model of a folder with its weights in `dtype`, in training mode, without anything of ours but
    quantised layers, where they are asked for."""
    stored, device = StoredWeights.open(folder), torch.device(device)
    module = empty_module(folder, dtype=dtype, allow_remote_code=allow_remote_code)
    weights = None if quantized is None else QuantizedWeights.open(quantized)
    name_of = naming(module)
    if any(name_of(name)[1] for name in stored.files):
        module = _read_by_transformers(folder, module, dtype)
        if weights is not None:
            place_quantized(module, weights, dtype)
        module.to(device)
    else:
        if weights is not None:
            place_quantized(module, weights, dtype)
            name_of = naming(module)
        _put_in(module, stored, name_of, dtype=dtype, device=device, private=trainable)
    for parameter in module.parameters():
        parameter.requires_grad_(trainable)
    return module.train()


def empty_module(folder: Path, *, dtype: torch.dtype, allow_remote_code: bool = False) -> nn.Module:
    """The transformers model of a folder: parameters on the meta device, buffers on the CPU with their values."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = load_config(folder, allow_remote_code=allow_remote_code)
    try:
        with no_init_weights(), _parameters_on_meta():
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=allow_remote_code)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise UserError(
            f"{folder} is a {config.model_type} model, and transformers has no causal language model of that kind: "
            "give a decoder-only language model"
        ) from None
    # Families compute their buffers once more in fp32 here, where the constructor worked in `dtype` (gptj's positions).
    for part in module.modules():
        if part._non_persistent_buffers_set and hasattr(module, "_init_weights"):
            module._init_weights(part)
    return module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that modules register inside go to the meta device; their own memory is never touched.

    Buffers stay real, so that whatever a family computes for them in its constructor (rotary frequencies, scales) holds.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass
class Found:
    """What did not fit, while weights are put in."""

    missing: set[str]
    unexpected: list[str]
    misshaped: list[str]


def _put_in(
    module: nn.Module,
    stored: StoredWeights,
    name_of: Naming,
    *,
    dtype: torch.dtype,
    device: torch.device,
    private: bool,
) -> None:
    """Put every stored tensor in its place, move the buffers, tie what is tied; then say all that did not fit."""
    state = module.state_dict(keep_vars=True)
    quantized = {f"{name}.weight" for name in quantized_layers(module)}
    kept = kept_in_fp32(module, dtype)
    found = Found(set(state), [], [])
    for stored_name, tensor in stored.tensors():
        name = name_of(stored_name)[0]
        if name in quantized:  # mapped, never touched: no page of it is read
            continue
        if name not in state:
            found.unexpected.append(stored_name)
        elif tensor.shape != state[name].shape:
            found.misshaped.append(
                f"{stored_name} has shape {tuple(tensor.shape)} in the file and {tuple(state[name].shape)} by config.json"
            )
            found.missing.discard(name)
        else:
            wanted = torch.float32 if kept(name) else dtype
            made = tensor.to(device=device, dtype=wanted if tensor.is_floating_point() else tensor.dtype)
            _assign(module, name, made.clone() if private and made.data_ptr() == tensor.data_ptr() else made)
            found.missing.discard(name)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device:
                owner._buffers[name] = buffer.to(device)
    module.tie_weights(missing_keys=found.missing, recompute_mapping=False)  # type: ignore[operator]
    raise_for(found, module, stored.folder)


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def kept_in_fp32(module: nn.Module, dtype: torch.dtype) -> Any:
    """Whether a family asks for fp32 of a parameter, as transformers decides it while reading weights in `dtype`."""
    import re

    strict = tuple(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    loose = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    names = (strict if dtype in (torch.float16, torch.bfloat16) else ()) + (loose if dtype == torch.float16 else ())
    if not names:
        return lambda name: False
    pattern = re.compile("|".join(name.replace("*", ".*") for name in names))
    return lambda name: pattern.search(name) is not None


def raise_for(found: Found, module: nn.Module, folder: Path) -> None:
    import re

    def ignored(name: str, patterns: Any) -> bool:
        return any(re.search(pattern, name) for pattern in patterns or ())

    buffers = {name for name, _ in module.named_buffers()}
    prefix = getattr(module, "base_model_prefix", "")
    missing = sorted(n for n in found.missing if not ignored(n, getattr(module, "_keys_to_ignore_on_load_missing", ())))
    # Older versions of transformers stored buffers (causal masks, rotary frequencies) that are computed today.
    computed = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
    unexpected = sorted(
        name
        for name in found.unexpected
        if name not in buffers
        and f"{prefix}.{name}" not in buffers
        and not name.endswith(computed)
        and not ignored(name, getattr(module, "_keys_to_ignore_on_load_unexpected", ()))
    )
    problems = []
    if missing:
        problems.append(f"{folder} lacks {_some(missing)}, which config.json asks for: download or convert the model again")
    if unexpected:
        problems.append(
            f"{folder} holds {_some(unexpected)}, unknown to its config.json: give weights and config.json of one model"
        )
    if found.misshaped:
        problems.append(f"{folder}: {_some(found.misshaped)}: give weights and config.json of one model")
    if problems:
        raise UserError(*problems)


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return "; ".join(names[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else "")


def _read_by_transformers(folder: Path, empty: nn.Module, dtype: torch.dtype) -> nn.Module:
    """For checkpoints that transformers joins or splits while reading (experts stored one by one): its own loader.

    The weights are then a private copy of this process.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        module, info = type(empty).from_pretrained(  # type: ignore[attr-defined]
            folder, config=empty.config, dtype=dtype, output_loading_info=True, local_files_only=True, use_safetensors=True
        )
    finally:
        if shown:
            logging.enable_progress_bar()
    misshaped = [f"{name} has another shape than by config.json" for name, *_ in info["mismatched_keys"]]
    raise_for(Found(set(info["missing_keys"]), list(info["unexpected_keys"]), misshaped), module, folder)
    return module
