"""What a built model does, found by running it on a handful of tokens: no list of families.

One forward of three rows of twelve tokens with the model's own attention says whether it is causal, what happens between
its body and its head and behind its head; flat forwards of the same documents say whether the flat layout means the same.
They run through one block of each kind, and the head makes no product: milliseconds, whatever the size of the model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fleetune.models import attention
from fleetune.models.anatomy import Anatomy
from fleetune.models.layout import lay_out
from fleetune.spec.errors import UserError
from fleetune.spec.records import MicroBatch

#: Logits put behind the head to see what the family does with them: small ones show a scale, large ones a cap.
_TRIAL_LOGITS = (0.0, 1e-3, -1e-3, 0.5, -2.0, 7.0, -20.0, 60.0, -300.0, 1e5, -1e5)
_LENGTH = 12
#: Largest difference, relative to the largest value, that rounding explains.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Traits:
    """What was found.

    flat: whether the flat layout is exact here; else `not_flat` says why. through_head: the hidden states change between
    body and head, so they are taken at the head's door. scale, softcap: what is done to the head's products (see `Head`).
    shared: names within a block of linears that are given one and the same tensor, each such group once.
    """

    flat: bool
    not_flat: str
    through_head: bool
    scale: float
    softcap: float | None
    shared: tuple[tuple[str, ...], ...] = ()


def probe(model: nn.Module, anatomy: Anatomy, device: torch.device, *, try_flat: bool = True) -> Traits:
    """Probe a transformers model that has its weights. Leaves it as it was. Raises UserError if it is not causal."""
    training, threads = model.training, torch.get_num_threads()
    model.eval()
    torch.set_num_threads(1)  # for so few tokens, threads only wait for each other: tenfold on a busy machine
    try:
        with torch.no_grad():
            try:
                with _one_block_of_eachkind_of_block(model, anatomy):
                    return _probe(model, anatomy, device, try_flat)
            except (IndexError, KeyError, RuntimeError, TypeError, ValueError):  # a family that counts its blocks elsewhere
                return _probe(model, anatomy, device, try_flat)
    finally:
        torch.set_num_threads(threads)
        model.train(training)


@contextmanager
def _one_block_of_eachkind_of_block(model: nn.Module, anatomy: Anatomy) -> Iterator[None]:
    blocks = model.get_submodule(anatomy.blocks)
    whole = blocks._modules
    kinds = {kind_of_block(block): block for block in reversed(list(whole.values())) if block is not None}
    blocks._modules = {str(index): block for index, block in enumerate(reversed(kinds.values()))}
    try:
        yield
    finally:
        blocks._modules = whole


def kind_of_block(block: nn.Module) -> str:
    """What tells blocks apart: their modules' classes and settings, not their number."""
    described = []
    for name, module in block.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, str | bool | int | float | None)}
        settings = {key: value for key, value in settings.items() if not key.endswith(("idx", "index", "layer_number"))}
        described.append((name, type(module).__qualname__, sorted(settings.items())))
    return repr(described)


def _probe(model: nn.Module, anatomy: Anatomy, device: torch.device, try_flat: bool) -> Traits:
    size = int(model.get_submodule(anatomy.embedding).weight.shape[0])  # type: ignore[union-attr, index]
    documents = 4 + (7 * np.arange(2 * _LENGTH)) % max(1, size - 4)
    last_changed = np.append(documents[: _LENGTH - 1], documents[-1])
    rows = torch.from_numpy(np.concatenate([last_changed, documents]).reshape(3, _LENGTH)).to(device)
    with _seeing_inputs(model, anatomy) as inputs:
        own = _own_forward(model, anatomy, rows)
    tolerance = TOLERANCE.get(own.at_head.dtype, 1e-4) * float(own.at_head.float().abs().max())
    shorter = _own_forward(model, anatomy, rows[:1, :5]).at_head[0]
    seen = max(_difference(own.at_head[1, :-1], own.at_head[0, :-1]), _difference(shorter, own.at_head[0, :5]))
    if not seen <= tolerance:
        raise UserError(
            f"{type(model).__name__} lets a token see the tokens after it, or how many there are: it is not a causal language "
            "model as configured. Give a decoder (for a BERT-like model, is_decoder in its config.json)"
        )
    through_head = own.of_body.shape != own.at_head.shape or _difference(own.of_body, own.at_head) > 0
    scale, softcap = _behind_head(model, own.trial, own.logits)
    reason = _why_not_flat(model, anatomy) if try_flat else "not asked for"
    if not reason:
        try:
            flat = _flat_forward(model, anatomy, documents, device)
            off = _difference(flat[0, : len(documents)], own.of_body[1:].flatten(0, 1))
            if not off <= tolerance:
                reason = f"its flat forward differs from its own by {off:.2g}"
        except Exception as error:  # whatever a family does with what it does not expect, the other layout is exact
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Traits(not reason, reason, through_head, scale, softcap, _sharing(inputs))


@contextmanager
def _seeing_inputs(model: nn.Module, anatomy: Anatomy) -> Iterator[list[tuple[int, str, torch.Tensor]]]:
    """(number of the block, name of a linear within it, its input) of each call inside, in order."""
    seen: list[tuple[int, str, torch.Tensor]] = []
    hooks = []
    for number, block in enumerate(model.get_submodule(anatomy.blocks).children()):
        for name, module in block.named_modules():
            if name in anatomy.linears:
                see = partial(_see, seen, number, name)
                hooks.append(module.register_forward_pre_hook(see))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _see(seen: list[tuple[int, str, torch.Tensor]], number: int, name: str, module: nn.Module, args: Any) -> None:
    if args and isinstance(args[0], torch.Tensor):
        seen.append((number, name, args[0]))


def _sharing(inputs: list[tuple[int, str, torch.Tensor]]) -> tuple[tuple[str, ...], ...]:
    """Groups of names, each name in one group at most: the first that it is seen in."""
    groups: dict[tuple[int, int], list[str]] = {}
    for number, name, given in inputs:  # the tensors live, so an id is one tensor's alone
        groups.setdefault((number, id(given)), []).append(name)
    chosen: list[tuple[str, ...]] = []
    for names in groups.values():
        if len(names) > 1 and not {*names} & {name for group in chosen for name in group}:
            chosen.append(tuple(dict.fromkeys(names)))
    return tuple(chosen)


@dataclass(frozen=True)
class _Own:
    """of_body, at_head: [R, C, H], the body's output and the head's input. trial, logits: [R, C, V], what the head was
    made to say, and what came out."""

    of_body: torch.Tensor
    at_head: torch.Tensor
    trial: torch.Tensor
    logits: torch.Tensor


def _own_forward(model: nn.Module, anatomy: Anatomy, rows: torch.Tensor) -> _Own:
    seen: dict[str, torch.Tensor] = {}
    head = model.get_submodule(anatomy.head)
    size = int(head.weight.shape[0])  # type: ignore[union-attr, index]

    def at_body(module: nn.Module, args: Any, output: Any) -> None:
        seen["body"] = hidden_of(output)

    def instead_of_head(hidden: torch.Tensor) -> torch.Tensor:
        seen["head"] = hidden
        values = torch.tensor(_TRIAL_LOGITS, dtype=torch.float32, device=hidden.device)
        seen["trial"] = values.repeat(-(-size // len(values)))[:size].expand(*hidden.shape[:-1], size)
        return seen["trial"]

    hook = model.get_submodule(anatomy.body).register_forward_hook(at_body)
    head.forward = instead_of_head  # type: ignore[method-assign, assignment]
    try:
        logits = model(input_ids=rows, use_cache=False).logits
    finally:
        del head.forward
        hook.remove()
    return _Own(seen["body"], seen["head"], seen["trial"], logits.float())


def _behind_head(model: nn.Module, trial: torch.Tensor, logits: torch.Tensor) -> tuple[float, float | None]:
    """(scale, softcap) that turn `trial` into `logits`. Raises UserError where it is neither."""
    if logits.shape == trial.shape:
        at = dict(zip(_TRIAL_LOGITS, logits.flatten(0, -2)[0].tolist()))
        scale = round_to_float32(at[1e-3] / 1e-3)
        if torch.allclose(logits, trial * scale, rtol=1e-5, atol=1e-9):
            return scale, None
        softcap = at[1e5]
        if softcap > 0 and math.isfinite(softcap):
            capped = torch.tanh(trial * scale / softcap) * softcap
            if torch.allclose(logits, capped, rtol=1e-4, atol=1e-7):
                return scale, softcap
    raise UserError(
        f"{type(model).__name__} changes its logits behind the head in a way that is neither a scale nor a soft cap: it "
        "cannot be trained here. Give another model"
    )


def round_to_float32(value: float) -> float:
    """The nearest number with few digits, where rounding of fp32 is all that is between them."""
    short = float(f"{value:.6g}")
    return short if math.isclose(short, value, rel_tol=1e-6) else value


def _why_not_flat(model: nn.Module, anatomy: Anatomy) -> str:
    if anatomy.recurrent:
        return "its blocks carry a state from token to token"
    if "position_ids" not in inspect.signature(body_of(model, anatomy).forward).parameters:
        return "its body takes no positions"
    return ""


def _flat_forward(model: nn.Module, anatomy: Anatomy, tokens: np.ndarray, device: torch.device) -> torch.Tensor:
    """[1, T, H] of two documents of equal length, after one lone document that shows the bare masks."""
    for bounds, name in (([0, len(tokens)], attention.CHECKED_NAME), ([0, _LENGTH, len(tokens)], attention.NAME)):
        count = len(bounds) - 1
        batch = MicroBatch(
            step=-1,
            number=-1,
            sequences=(0,),
            tokens=tokens,
            trained=np.zeros(len(tokens), dtype=bool),
            document_bounds=np.array(bounds),
            sequence_bounds=np.array([0, count]),
            samples=("",) * count,
        )
        laid_out = lay_out(batch, "flat", device)
        with using_attention(model, name):
            output = body_of(model, anatomy)(
                input_ids=laid_out.tokens, position_ids=laid_out.positions, use_cache=False, laid_out=laid_out
            )
    return hidden_of(output)


def body_of(model: nn.Module, anatomy: Anatomy) -> nn.Module:
    return model.get_submodule(anatomy.body)


def hidden_of(output: Any) -> torch.Tensor:
    """[R, C, H], the last hidden states of a body's output."""
    hidden = getattr(output, "last_hidden_state", None)
    return output[0] if hidden is None else hidden


@contextmanager
def using_attention(model: nn.Module, name: str) -> Iterator[None]:
    """The model's layers call the attention registered as `name` inside."""
    before = set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, before)


def set_attention(model: nn.Module, name: str) -> str:
    """Set a registered attention on the model's config, which its layers read at each call. Returns the one before."""
    if name in (attention.NAME, attention.CHECKED_NAME):
        attention.register()
    before = str(model.config._attn_implementation)
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    for config in configs.values():
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name
    return before


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.float() - second.float()).abs().max())
