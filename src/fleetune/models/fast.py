"""Operations of ours in the places of a family's own, wherever they are found to mean the same.

Nothing goes by a family's name. A norm, a gated feed-forward layer or a rotary embedding is tried on numbers that would show
any other form of it (a clamp, an offset, another rounding); what is not recognised stays as it is.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fleetune.models.gated import ACTIVATIONS, Activation, gated
from fleetune.models.lora import LoraLinear
from fleetune.models.rms_norm import FORMS, Form, rms_norm
from fleetune.models.rotate import rotate

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_ROTARY = "apply_rotary_pos_emb"
#: Sizes of the numbers that forms are tried on: small ones show an epsilon, large ones a clamp.
_SIZES = (1e-3, 1.0, 30.0, 3e3)


def replace_operations(module: nn.Module) -> None:
    """Give the parts of a transformers model that are recognised a forward of ours. Parameters may be on the meta device."""
    known: dict[Any, Any] = {}

    def once(kind: Any, find: Callable[[], Any]) -> Any:
        if kind not in known:
            known[kind] = find()
        return known[kind]

    for part in list(module.modules()):
        if "forward" in vars(part):  # somebody else's stands there
            continue
        found = _looks_like_norm(part)
        if found is not None:
            form = once((type(part), found), lambda: norm_form(part, found))  # noqa: B023 - called here and now
            if form is not None:
                part.forward = _NormForward(part, found, form)
        elif set(part._modules) == _GATED:
            kind = (type(part), repr(part.act_fn), *(child.bias is not None for child in _linears(part)))
            activation = once(kind, lambda: gate_activation(part))  # noqa: B023
            if activation is not None:
                part.forward = _GatedForward(part, activation)
        elif _calls_rotary(part):
            rebound = once(("rotary", type(part)), lambda: with_rotation(type(part).forward))  # noqa: B023
            if rebound is not None:
                part.forward = types.MethodType(rebound, part)


def _linears(part: nn.Module) -> list[Any]:
    return [part._modules[name] for name in ("gate_proj", "up_proj", "down_proj")]


def _looks_like_norm(part: nn.Module) -> float | None:
    """Its epsilon, if it has one vector of weights and nothing else."""
    if part._modules or part._buffers or list(part._parameters) != ["weight"]:
        return None
    weight = part._parameters["weight"]
    if weight is None or weight.ndim != 1:
        return None
    found = [vars(part)[name] for name in _EPSILONS if isinstance(vars(part).get(name), float)]
    return found[0] if len(found) == 1 else None


def norm_form(part: nn.Module, epsilon: float) -> Form | None:
    """Which root-mean-square norm this is, in fp32 and in bf16 and up to its gradients; None where it is none.

    Of forms that differ in their rounding alone, the one whose values are nearest in bf16.
    """
    generator = torch.Generator().manual_seed(0)
    size = part.get_parameter("weight").shape[0]
    forms = list(FORMS)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        weight = nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        trial = copy.copy(part)
        trial._parameters = {"weight": weight}
        x = torch.cat([torch.randn(2, 3, size, generator=generator) * scale for scale in _SIZES]).to(dtype).requires_grad_()
        g = torch.randn(x.shape, generator=generator).to(dtype)
        own = _with_gradients(lambda: type(part).forward(trial, x), (x, weight), g)  # noqa: B023
        if own is None:
            return None
        ours = {form: _norm_trial(x, weight, epsilon, form, g) for form in forms}
        forms = [form for form in forms if _same(own, ours[form], tolerance)]
        forms.sort(key=lambda form: float((ours[form][0].float() - own[0].float()).abs().sum()))
    return forms[0] if forms else None


def _norm_trial(x: torch.Tensor, weight: torch.Tensor, epsilon: float, form: Form, g: torch.Tensor) -> list[torch.Tensor]:
    made = _with_gradients(lambda: rms_norm(x, weight, epsilon, form), (x, weight), g)
    assert made is not None
    return made


def _with_gradients(run: Callable[[], Any], inputs: tuple[torch.Tensor, ...], g: torch.Tensor) -> list[torch.Tensor] | None:
    """What comes out, and the gradients of the inputs; None where it is no single tensor of g's shape, or does not run."""
    try:
        with torch.enable_grad():
            y = run()
            if not isinstance(y, torch.Tensor) or y.shape != g.shape or y.dtype != g.dtype:
                return None
            return [y.detach(), *torch.autograd.grad(y, inputs, g)]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None


def _same(own: list[torch.Tensor], ours: list[torch.Tensor] | None, tolerance: float) -> bool:
    """Whether each row of each tensor agrees, measured by the row's largest value."""
    if ours is None:
        return False
    return all(
        bool(((a.float() - b.float()).abs() <= tolerance * a.float().abs().amax(-1, keepdim=True)).all())
        for a, b in zip(own, ours)
    )


def gate_activation(part: nn.Module) -> Activation | None:
    """Which `down(act(gate(x)) * up(x))` this is, tried at a tiny size; None where it is none."""
    if part._parameters or part._buffers or not all(isinstance(child, nn.Linear) for child in _linears(part)):
        return None
    generator = torch.Generator().manual_seed(0)
    trial: Any = copy.copy(part)
    trial._modules = dict(part._modules)
    for name, child, shape in zip(("gate_proj", "up_proj", "down_proj"), _linears(part), ((6, 4), (6, 4), (4, 6))):
        linear = nn.Linear(shape[1], shape[0], bias=child.bias is not None)
        for parameter in linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        trial._modules[name] = linear
    x = torch.cat([torch.randn(2, 9, 4, generator=generator) * size for size in _SIZES]).requires_grad_()
    g = torch.randn(x.shape, generator=generator)
    own = _with_gradients(lambda: type(part).forward(trial, x), (x,), g)
    if own is None:
        return None
    for activation in ACTIVATIONS:
        product = lambda: gated(trial.gate_proj(x), trial.up_proj(x), activation)  # noqa: B023, E731
        if _same(own, _with_gradients(lambda: trial.down_proj(product()), (x,), g), 1e-5):  # noqa: B023
            return activation
    return None


def _calls_rotary(part: nn.Module) -> bool:
    """Whether its forward names the function, behind nothing but transformers' renaming of old keywords."""
    forward: Any = type(part).forward
    while hasattr(forward, "__wrapped__"):
        if forward.__globals__["__name__"] != "transformers.utils.deprecation":
            return False
        forward = forward.__wrapped__
    code = getattr(forward, "__code__", None)
    return code is not None and _ROTARY in code.co_names


def with_rotation(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The same function with our rotation where it calls its module's; None where that one does something else."""
    plain: Any = inspect.unwrap(forward)
    own = plain.__globals__.get(_ROTARY)
    if own is None or not _rotates_as_ours(own):
        return None
    made = types.FunctionType(
        plain.__code__, {**plain.__globals__, _ROTARY: _Rotation(own)}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def _rotates_as_ours(own: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 8, generator=generator).requires_grad_() for heads in (3, 2))
    cos, sin = (torch.randn(1, 5, 8, generator=generator) for _ in range(2))
    for x in (q, k):
        g = torch.randn(x.shape, generator=generator)
        index = 0 if x is q else 1
        theirs = _with_gradients(lambda: own(q, k, cos, sin)[index], (x,), g)  # noqa: B023
        ours = _with_gradients(lambda: rotate(x, cos[:, None], sin[:, None]), (x,), g)  # noqa: B023
        if theirs is None or not _same(theirs, ours, 1e-6):
            return False
    return True


class _Rotation:
    """Takes the place of a family's function. Where types differ, or a caller asks for more, the family's own is called."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, q: torch.Tensor, k: torch.Tensor, *args: Any, **others: Any) -> Any:
        if len(args) != 2 or others or q.ndim != 4 or q.dtype != k.dtype or not _narrows(q, *args):
            return self._own(q, k, *args, **others)
        cos, sin = (x.unsqueeze(1) for x in args)
        return rotate(q, cos, sin), rotate(k, cos, sin)


def _narrows(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether what is rotated may have the dtype of q: all have it, or the products that follow bring it there anyway."""
    kind = q.device.type
    follows = torch.is_autocast_enabled(kind) and q.dtype == torch.get_autocast_dtype(kind)
    fits = cos.ndim == sin.ndim == 3 and cos.shape[-1] == q.shape[-1]
    return fits and cos.dtype == sin.dtype and (cos.dtype == q.dtype or (follows and cos.dtype == torch.float32))


class _NormForward:
    """Takes the place of a norm's `forward`."""

    def __init__(self, part: nn.Module, epsilon: float, form: Form) -> None:
        self._part, self._epsilon, self._form = part, epsilon, form

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._part.weight, self._epsilon, self._form)  # type: ignore[arg-type]


class _GatedForward:
    """Takes the place of a gated layer's `forward`. Its linears are looked up at each call: adapters take their places."""

    def __init__(self, part: Any, activation: Activation) -> None:
        self._part, self._activation = part, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        part = self._part
        gate, up, down = part.gate_proj(x), part.up_proj(x), part.down_proj
        if isinstance(down, LoraLinear) and down.is_fused and not has_hooks(down):
            return down.of_gated(gate, up, self._activation)
        return down(gated(gate, up, self._activation))


def has_hooks(layer: nn.Module) -> bool:
    """Whether calling the layer does more than its class's `forward`."""
    return bool("forward" in vars(layer) or layer._forward_pre_hooks or layer._forward_hooks)
