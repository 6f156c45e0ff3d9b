"""A model in pieces: built without any memory for its weights, of which each rank then reads only what it keeps.

Nothing here is collective. The weights' files are read slice by slice; new weights of an adapter are a function of the seed
and their name, so that all ranks' pieces fit together without a word between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fleetune.models.adapters import renamed_adapter
from fleetune.models.anatomy import Anatomy
from fleetune.models.blocks import prepare_blocks
from fleetune.models.build import Found, empty_module, kept_in_fp32, raise_for
from fleetune.models.causal import CausalModel
from fleetune.models.dropout import Randomness
from fleetune.models.lora import keyed_uniform
from fleetune.models.lora_experts import SUFFIX, LoraStack
from fleetune.models.origins import PieceReader, find_origins
from fleetune.models.probe import Traits, kind_of_block, probe
from fleetune.models.stored import StoredWeights, naming
from fleetune.models.wanted import WantedModel, adapted


def empty_model(wanted: WantedModel, device: torch.device) -> CausalModel:
    """The wanted model with its adapter: parameters on the meta device, in the dtypes they will have; buffers on `device`.

    Raises UserError naming every missing, unexpected or mis-shaped weight, from the files' headers alone.
    """
    dtype = torch.float32 if wanted.is_full else wanted.dtype
    module = empty_module(wanted.folder, dtype=dtype, allow_remote_code=wanted.allow_remote_code)
    stored = StoredWeights.open(wanted.folder)
    _check_headers(module, stored)
    kept = kept_in_fp32(module, dtype)
    for name, parameter in list(module.named_parameters()):
        parameter.requires_grad_(wanted.is_full)
        if kept(name) and parameter.dtype != torch.float32:
            _replace(module, name, nn.Parameter(parameter.detach().float(), requires_grad=wanted.is_full))
    _put_buffers(module, stored, device)
    anatomy = Anatomy.of(module)
    traits = _traits(wanted, anatomy, device)
    model = CausalModel(
        module,
        anatomy,
        traits,
        compute_dtype=wanted.dtype,
        device=device,
        randomness=Randomness(wanted.seed),
        folder=wanted.folder,
        fast=wanted.fast,
    )
    prepare_blocks(model, gradient_checkpointing=wanted.gradient_checkpointing)
    module.train()
    return model if wanted.is_full else adapted(model, wanted)


class WeightPieces:
    """The first values of every parameter of an empty model, any piece of each. It keeps its files open while it lives."""

    def __init__(self, model: CausalModel, wanted: WantedModel) -> None:
        self._model, self._wanted = model, wanted
        stored = StoredWeights.open(wanted.folder)
        self._reader = PieceReader(stored, find_origins(model.module, stored)[0])
        self._same = _aliases(model.module)
        self._saved = renamed_adapter(model, wanted.adapter_folder)[1] if wanted.adapter_folder else None
        self._adapted = set[str]()
        if model.adapter is not None:
            self._adapted |= {*model.adapter.targets, *(f"{stack}{SUFFIX}" for stack in model.adapter.stacks)}

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A piece of one parameter, on the CPU; base weights in the dtype of their file, an adapter's in fp32."""
        at = tuple(slice(start, start + size) for start, size in zip(offset, shape))
        if self._saved is not None and name in self._saved:
            return self._saved[name][at]
        target, _, kind = name.rpartition(".lora_")
        if target in self._adapted:
            return self._new(target, f"lora_{kind}", name, at)
        return self._slice(name, at)

    def _new(self, target: str, kind: str, name: str, at: tuple[slice, ...]) -> torch.Tensor:
        """Of a new adapter: A is drawn, B begins as zeros, a magnitude as the norm of its row of the base weight."""
        layer: Any = self._model.module.get_submodule(target)
        if kind == "lora_A.weight":
            assert self._model.adapter is not None
            ranks = layer.rank * layer.num_experts if isinstance(layer, LoraStack) else self._model.adapter.rank_of(target)
            columns = layer.in_features
            return keyed_uniform((ranks, columns), columns**-0.5, self._wanted.seed, name)[at]
        if kind == "lora_B.weight":
            return torch.zeros([part.stop - part.start for part in at])
        rows = at[0]
        whole = slice(0, layer.in_features)
        weight = self._slice(f"{target}.weight", (whole, rows) if layer.transposed else (rows, whole)).float()
        return torch.linalg.vector_norm(weight, dim=0 if layer.transposed else 1)

    def _slice(self, name: str, at: tuple[slice, ...]) -> torch.Tensor:
        return self._reader.read(next(other for other in self._same.get(name, (name,)) if other in self._reader), at)


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name -> all names of the same parameter, where it has several (a head tied to the embedding)."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(same) for same in names.values() if len(same) > 1 for name in same}


def tied_names(module: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter that has several, its own one first."""
    return list(dict.fromkeys(_aliases(module).values()))


def _check_headers(module: nn.Module, stored: StoredWeights) -> None:
    """Tie what is tied, and raise for whatever does not fit between the files' headers and config.json."""
    state = module.state_dict(keep_vars=True)
    origins, unexpected = find_origins(module, stored)
    found = Found(set(state) - set(origins), unexpected, [])
    shapes = dict(stored.shapes())
    for name, origin in origins.items():
        if (shape := origin.shape(shapes)) != tuple(state[name].shape):
            stored_name = origin.parts[0][0]
            found.misshaped.append(f"{stored_name} has shape {shape} in the file and {tuple(state[name].shape)} by config.json")
    module.tie_weights(missing_keys=found.missing, recompute_mapping=False)  # type: ignore[operator]
    raise_for(found, module, stored.folder)


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter in its place, and in the places of the same one's other names."""
    for same in _aliases(module).get(name, (name,)):
        path, _, leaf = same.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = parameter


def _put_buffers(module: nn.Module, stored: StoredWeights, device: torch.device) -> None:
    """Buffers are small: each rank has all of them, with the file's values where it has some."""
    name_of = naming(module)
    kept = {name for name in module.state_dict(keep_vars=True) if name not in dict(module.named_parameters())}
    values = {name: value for name, value in ((name_of(n)[0], t) for n, t in stored.tensors()) if name in kept} if kept else {}
    for path, owner in module.named_modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                name = f"{path}.{leaf}" if path else leaf
                owner._buffers[leaf] = values.get(name, buffer).to(device=device, dtype=buffer.dtype).clone()


def _traits(wanted: WantedModel, anatomy: Anatomy, device: torch.device) -> Traits:
    """Probe a model of one block of each kind, which has the stored weights of just these; whole where that does not run."""
    try:
        return probe(_filled(wanted, anatomy, device, cut=True), anatomy, device)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return probe(_filled(wanted, anatomy, device, cut=False), anatomy, device)


def _filled(wanted: WantedModel, anatomy: Anatomy, device: torch.device, *, cut: bool) -> nn.Module:
    """On the CPU weights stay mapped pages of their files. What is stored otherwise (experts one by one) gets any values."""
    dtype = wanted.dtype
    module = empty_module(wanted.folder, dtype=dtype, allow_remote_code=wanted.allow_remote_code)
    name_of = naming(module)
    if cut:
        blocks: Any = module.get_submodule(anatomy.blocks)
        first = {kind_of_block(block): index for index, block in reversed(list(blocks._modules.items()))}
        blocks._modules = {index: block for index, block in blocks._modules.items() if index in first.values()}
    state = module.state_dict(keep_vars=True)
    for stored_name, tensor in StoredWeights.open(wanted.folder).tensors():
        name = name_of(stored_name)[0]
        if name in state and tensor.shape == state[name].shape:
            value = tensor.to(device=device, dtype=state[name].dtype)
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                owner._buffers[leaf] = value
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            generator = torch.Generator().manual_seed(1)
            values = torch.randn(parameter.shape, generator=generator).mul_(0.05).to(device=device, dtype=parameter.dtype)
            _replace(module, name, nn.Parameter(values, requires_grad=False))
    for owner in module.modules():
        owner._buffers = {leaf: None if buffer is None else buffer.to(device) for leaf, buffer in owner._buffers.items()}
    return module
