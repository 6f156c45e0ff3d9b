"""Putting an adapter into a model: a new one, or one that was saved in PEFT's format."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fleetune.models.adapter_files import SavedAdapter, read_adapter
from fleetune.models.anatomy import is_conv1d, is_linear
from fleetune.models.causal import CausalModel
from fleetune.models.lora import AdapterKind, AdapterSettings, LoraLinear, SharedInput, weight_names
from fleetune.models.lora_experts import SUFFIX, adapt_stack
from fleetune.models.quantized_linear import QuantizedLinear
from fleetune.models.stored import naming
from fleetune.spec.errors import UserError, raise_if_any


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
    stacks = find_stacks(model, targets)
    left = tuple(target for target in targets if not any(f".{stack}".endswith(f".{target}") for stack in stacks))
    chosen = find_targets(model, left) if left or not stacks else ()
    if stacks and (adapter == "dora" or dropout > 0):
        given = "adapter dora" if adapter == "dora" else f"lora_dropout {dropout:g}"
        named = ", ".join(target for target in targets if target not in left)
        raise UserError(
            f"{given} and an adapter on experts (lora_targets {named}): PEFT's format has no norms and no dropout for stacked "
            "experts. Give --adapter lora or rslora and --lora-dropout 0, or leave the experts out of --lora-targets"
        )
    conv1ds = [is_conv1d(model.module.get_submodule(name)) for name in chosen]
    settings = AdapterSettings(adapter, rank, alpha, dropout, chosen, transposed=any(conv1ds), stacks=stacks)
    return _insert(model, settings, seed)


def find_stacks(model: CausalModel, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Full names of the stacked expert parameters that `targets` name, in the model's order; none where nothing is named."""
    names = {name for name, _ in model.module.named_parameters()}
    there = [f"{block}.{name}" for block in model.anatomy.block_names() for name in model.anatomy.experts]
    return tuple(name for name in there if name in names and any(f".{name}".endswith(f".{target}") for target in targets))


def find_targets(model: CausalModel, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Full names of the linear layers in the blocks that `targets` name, in the model's order. Raises UserError."""
    within = model.anatomy.linears
    modules = dict(model.module.named_modules())
    there = [f"{block}.{name}" for block in model.anatomy.block_names() for name in within if f"{block}.{name}" in modules]
    if not targets:
        return tuple(name for name in there if not f".{name}".endswith(tuple(f".{other}" for other in model.anatomy.bypassed)))
    named = {target: [name for name in there if f".{name}".endswith(f".{target}")] for target in targets}
    problems = [_unmatched(model, target) for target, found in named.items() if not found]
    problems += [
        f"lora_targets {target} names {found}, whose weight this model hands to a kernel past the layer, so that an adapter on "
        "it would be left out: leave this target out"
        for target in targets
        for found in model.anatomy.bypassed
        if f".{found}".endswith(f".{target}")
    ]
    raise_if_any(problems)
    chosen = {name for found in named.values() for name in found}
    return tuple(name for name in there if name in chosen)


def _unmatched(model: CausalModel, target: str) -> str:
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in (*model.anatomy.linears, *model.anatomy.experts)))
    near = difflib.get_close_matches(target, [*known, *model.anatomy.linears], n=1)
    why = "names no linear layer of the model's blocks"
    if target.rpartition(".")[2] == model.anatomy.head.rpartition(".")[2]:
        why = "is the head, which an adapter leaves as it is"
    hint = f"did you mean {near[0]}? " if near else ""
    return f"lora_targets {target} {why}: {hint}give some of {', '.join(known)}, or nothing for all of them"


def _insert(model: CausalModel, settings: AdapterSettings, seed: int) -> CausalModel:
    if model.adapter is not None:
        raise ValueError("the model has an adapter already")
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)
    modules: dict[str, LoraLinear] = {}
    for name in settings.targets:
        path, _, leaf = name.rpartition(".")
        owner = model.module.get_submodule(path)
        modules[name] = layer = LoraLinear(getattr(owner, leaf), name, settings, seed, model.randomness)
        layer.plain = not model.fast
        setattr(owner, leaf, layer.train(owner.training))
    for name in settings.stacks:
        path, _, leaf = name.rpartition(".")
        owner = model.module.get_submodule(path)
        if hasattr(owner, "config"):
            owner.config._experts_implementation = "eager"  # one expert after the other, so that each meets its adapter
        adapt_stack(owner, leaf, name, settings, seed)
    for block in model.anatomy.block_names() if model.fast else ():
        for group in model.traits.shared:
            layers = [modules[f"{block}.{name}"] for name in group if f"{block}.{name}" in modules]
            if len(layers) > 1:
                SharedInput(layers)
    model.adapter = replace(settings, short_targets=_short_targets(model, settings.targets))
    return model


def _short_targets(model: CausalModel, targets: tuple[str, ...]) -> tuple[str, ...]:
    """The last parts of the targets' names, if PEFT, which goes by endings of names, finds just the targets by them."""
    short = {target.rpartition(".")[2] for target in targets}
    ending = {name for name, _ in model.module.named_modules() if name.rpartition(".")[2] in short}
    return tuple(sorted(short)) if ending == set(targets) else ()


def load_adapter(model: CausalModel, folder: Path, *, trainable: bool) -> CausalModel:
    """Freeze the model and put a saved adapter in, to go on training it or to use it; returns the same model.

    Raises UserError for what is no LoRA adapter of PEFT's, for one that does more than low-rank layers can, and for one
    that was made for another base model.
    """
    settings, tensors = renamed_adapter(model, folder)
    raise_if_any(_wrong_shapes(model, folder, settings, tensors))
    _insert(model, settings, seed=0)
    with torch.no_grad():
        for name, value in tensors.items():
            parameter = model.module.get_parameter(name)
            parameter.copy_(value)
            parameter.requires_grad_(trainable)
    return model


def renamed_adapter(model: CausalModel, folder: Path) -> tuple[AdapterSettings, dict[str, torch.Tensor]]:
    """(settings, weights by their name in the model) of a saved adapter. Raises UserError as `load_adapter` does."""
    saved = read_adapter(folder)
    name_of = naming(model.module)
    modules = dict(model.module.named_modules())
    stacks = _saved_stacks(model, folder, saved)
    renamed = {target: name_of(f"{target}.weight")[0].removesuffix(".weight") for target in saved.settings.targets}
    strange = [
        t for t, name in renamed.items() if name == model.anatomy.head or not _is_adaptable(modules.get(name, model.module))
    ]
    if strange:
        raise UserError(
            f"the adapter {folder} adapts {', '.join(strange[:3])}, which is no linear layer in a block of "
            f"{type(model.module).__name__}: give its own base model, or merge it with PEFT and give the merged model"
        )
    settings = saved.settings.renamed(renamed)
    names = tuple(name for name, _ in model.module.named_parameters() if name in set(stacks.values()))
    settings = replace(settings, targets=tuple(name for name in modules if name in set(settings.targets)), stacks=names)
    tensors = {f"{renamed[target]}.{kind}": value for (target, kind), value in saved.tensors.items() if target in renamed}
    tensors |= {
        f"{stacks[target]}{SUFFIX}.{kind}": value for (target, kind), value in saved.tensors.items() if target in stacks
    }
    return settings, tensors


def _saved_stacks(model: CausalModel, folder: Path, saved: SavedAdapter) -> dict[str, str]:
    """Name in the file -> full name of the stack. PEFT wraps a module once for each of its stacks, the first one innermost."""
    found: dict[str, str] = {}
    for stored in saved.stacks:
        owner = stored.replace(".base_layer", "")
        depth = stored.count(".base_layer")
        try:
            leaves = [leaf for leaf, _ in model.module.get_submodule(owner).named_parameters(recurse=False)]
        except AttributeError:
            leaves = []
        named = [leaf for leaf in leaves if any(f".{owner}.{leaf}".endswith(f".{wanted}") for wanted in saved.parameters)]
        if depth >= len(named):
            raise UserError(
                f"the adapter {folder} adapts {stored}, which this base model does not have: give its own base model"
            )
        found[stored] = f"{owner}.{named[len(named) - 1 - depth]}"
    return found


def _is_adaptable(module: torch.nn.Module) -> bool:
    """A linear layer, or one that has its adapter already."""
    return is_linear(module) or isinstance(module, LoraLinear)


def _wrong_shapes(model: CausalModel, folder: Path, settings: AdapterSettings, tensors: dict[str, torch.Tensor]) -> list[str]:
    problems = []
    for target in settings.targets:
        base = model.module.get_submodule(target)
        rows, columns = _shape(base)
        wanted: dict[str, tuple[int, ...]] = {
            "lora_A.weight": (settings.rank_of(target), columns),
            "lora_B.weight": (rows, settings.rank_of(target)),
        }
        wanted["lora_magnitude_vector"] = (rows,)
        for kind in weight_names(settings.kind):
            if (shape := tuple(tensors[f"{target}.{kind}"].shape)) != tuple(wanted[kind]):
                problems.append(
                    f"the adapter {folder} has {target}.{kind} of shape {shape}, and this base model needs "
                    f"{tuple(wanted[kind])}: give the base model that it was made for"
                )
    for stack in settings.stacks:
        base = model.module.get_parameter(stack)
        rows = settings.rank_of(stack) * base.shape[0]
        first, second = (tensors[f"{stack}{SUFFIX}.{kind}"].shape for kind in weight_names("lora"))
        if sorted((*first, *second)) != sorted((rows, rows, *base.shape[1:])):
            problems.append(
                f"the adapter {folder} has {tuple(first)} and {tuple(second)} for the experts {stack} of shape "
                f"{tuple(base.shape)}: give the base model that it was made for"
            )
    return problems[:3]


def _shape(base: nn.Module) -> tuple[int, int]:
    """[out, in] of a linear layer."""
    if isinstance(base, QuantizedLinear):
        return base.shape
    return base.weight.t().shape if is_conv1d(base) else base.weight.shape  # type: ignore[operator, union-attr, return-value]
