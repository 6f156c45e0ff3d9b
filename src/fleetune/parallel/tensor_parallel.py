"""Tensor parallel from the model's own plan (transformers' `base_model_tp_plan`), on plain tensors.

The first linear of a pair is cut by columns of its output (whole heads), the second by rows of its input, so that a block
needs one sum forward and one backward for each pair (Shoeybi et al. 2019, arXiv 1909.08053). Parameters become this rank's
parts, so that FSDP can shard those further. Adapters are cut with their layers.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fleetune.models.anatomy import is_conv1d
from fleetune.models.dropout import KeyedDropout
from fleetune.models.lora import LoraLinear
from fleetune.parallel.pieces import Cut
from fleetune.parallel.world import World
from fleetune.planning.combinations import NO_TENSOR_PLAN, OWN_DROPOUT_UNDER_TENSOR
from fleetune.spec.errors import UserError, raise_if_any

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel

_COLUMNS, _ROWS, _REPLICATED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_MEND = "give --shard instead of --tensor: it divides any model"


def cut_tensors(model: CausalModel, world: World) -> dict[str, Cut]:
    """Cut an empty model over this world's tensor ranks; returns how each parameter that it touches was cut.

    Raises UserError, before a weight is read, for a family without a plan, with one that is not known here, or with sizes
    that do not divide.
    """
    if world.layout.tensor == 1:
        return {}
    plan = _plan(model, world.layout.tensor)
    raise_if_any(_collisions(model, plan, world.layout.tensor))
    cuts: dict[str, Cut] = {}
    for name, style in plan.items():
        module = model.module.get_submodule(name)
        if style == _REPLICATED:
            cuts |= {f"{name}.{leaf}": Cut(None, partial=True) for leaf, _ in module.named_parameters()}
        else:
            cuts |= _cut_linear(name, module, style, world)
    for path in {name.rpartition(".")[0] for name, style in plan.items() if style == _COLUMNS}:
        entered = _Entrance(world)
        for leaf, child in model.module.get_submodule(path).named_children():
            if plan.get(f"{path}.{leaf}") == _COLUMNS:
                child.register_forward_pre_hook(entered)
    return cuts


def _plan(model: CausalModel, tensor: int) -> dict[str, str]:
    """Name of a module in the blocks -> style, from the plan's patterns."""
    config = model.module.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    patterns = getattr(text, "base_model_tp_plan", None) or {}
    modules = dict(model.module.named_modules())
    parameters = dict(model.module.named_parameters())
    found: dict[str, str] = {}
    strange = []
    for pattern, style in patterns.items():
        whole = re.compile(re.escape(f"{model.anatomy.body}.{pattern}").replace(r"\*", r"\d+"))
        names = [name for name in modules if whole.fullmatch(name) and name.startswith(f"{model.anatomy.blocks}.")]
        inside = [name for name in parameters if whole.fullmatch(name) and name.startswith(f"{model.anatomy.blocks}.")]
        if (names or inside) and style not in (_COLUMNS, _ROWS, _REPLICATED):
            strange.append(style)
        found |= dict.fromkeys(names, style)
    kind = type(model.module).__name__
    if strange:
        asks = ", ".join(sorted(set(strange)))
        raise UserError(NO_TENSOR_PLAN.told(f"tensor {tensor} and {kind}, whose plan asks for {asks}, which is not known here"))
    if not any(style == _COLUMNS for style in found.values()):
        raise UserError(NO_TENSOR_PLAN.told(f"tensor {tensor} and {kind}, which has no such plan"))
    return found


def _collisions(model: CausalModel, plan: dict[str, str], tensor: int) -> list[str]:
    config: Any = model.module.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    problems = []
    if heads % tensor or kv_heads % tensor:
        problems.append(
            f"tensor {tensor} does not divide the model's {heads} attention heads and {kv_heads} heads of keys and values: "
            "give a --tensor that divides both, or --shard, which divides anything"
        )
    for name, style in plan.items():
        layer: Any = model.module.get_submodule(name)
        if style == _REPLICATED or problems:
            continue
        if is_conv1d(layer) or not hasattr(layer, "in_features"):
            problems.append(f"{name} is no linear layer that tensor parallel can cut: {_MEND}")
            continue
        size = layer.out_features if style == _COLUMNS else layer.in_features
        if size % tensor:
            problems.append(f"tensor {tensor} does not divide the {size} features of {name}: {_MEND}")
    blocks = model.module.get_submodule(model.anatomy.blocks)
    drops = [m for m in blocks.modules() if isinstance(m, KeyedDropout) and m.p > 0 and not m.name.endswith(".lora_dropout")]
    if model.randomness.functional or drops:
        problems.append(OWN_DROPOUT_UNDER_TENSOR.told(f"tensor {tensor} and the model's own dropout"))
    return problems


def _cut_linear(name: str, module: nn.Module, style: str, world: World) -> dict[str, Cut]:
    dims: dict[str, int | None] = {
        "weight": 0,
        "bias": 0,
        "lora_A.weight": None,
        "lora_B.weight": 0,
        "lora_magnitude_vector": 0,
    }
    partial = {"lora_A.weight"}
    if style == _ROWS:
        dims = {"weight": 1, "bias": None, "lora_A.weight": 1, "lora_B.weight": None, "lora_magnitude_vector": None}
        partial = {"lora_B.weight", "lora_magnitude_vector"}
        _leave(module, world)
    cuts = {}
    for leaf, dim in dims.items():
        path, _, own = leaf.rpartition(".")
        owner = getattr(module, path, None) if path else module
        parameter = None if owner is None else owner._parameters.get(own)
        if owner is None or parameter is None:
            continue
        cuts[f"{name}.{leaf}"] = Cut(None, partial=leaf in partial)
        if dim is not None:
            size = parameter.shape[dim]
            each = size // world.layout.tensor
            start = each * world.coordinates.tensor
            part = parameter.detach().narrow(dim, start, each).contiguous()
            owner._parameters[own] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            cuts[f"{name}.{leaf}"] = Cut(dim, start, size)
    if isinstance(module, LoraLinear):
        columns = cuts[f"{name}.weight"]
        if style == _ROWS:
            module.lora_dropout.columns = (columns.start, columns.size)
            module.over_peers = lambda tensor: world.sum_over("tensor", tensor)
        else:
            module.out_features = int(module.weight.shape[0])
    return cuts


class _Entrance:
    """In front of the layers that read one input, each its columns: the input's gradient is the sum of all ranks' parts.

    Layers of one parent that are given the same tensor enter together, so its gradient is summed once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._last: tuple[Any, Any] = (lambda: None, lambda: None)

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        given, entered = self._last[0](), self._last[1]()
        if given is not args[0] or entered is None:
            entered = _Enter.apply(args[0], self._world)
            self._last = (weakref.ref(args[0]), weakref.ref(entered))
        return (entered, *args[1:])


def _leave(module: nn.Module, world: World) -> None:
    """Behind a layer that reads its rows of the input: the output is the sum of all ranks' parts, its bias added once."""
    forward: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def whole(x: torch.Tensor) -> torch.Tensor:
        bias = module._parameters.get("bias")
        if bias is not None:
            module._parameters["bias"] = None
        try:
            y = _Leave.apply(forward(x), world)
        finally:
            if bias is not None:
                module._parameters["bias"] = bias
        return y if bias is None else y + bias.to(y.dtype)

    module.forward = whole  # type: ignore[method-assign, assignment]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = d_x.clone(memory_format=torch.contiguous_format)
        ctx.world.sum_over("tensor", summed)
        return summed, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, world: World) -> torch.Tensor:
        summed = y.clone(memory_format=torch.contiguous_format)
        world.sum_over("tensor", summed)
        return summed

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d_y, None
