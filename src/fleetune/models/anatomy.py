"""The names of a causal language model's parts, found from its structure and never from its class's name.

`parallel/` splits any model by these names. What is asked of a family: token embedding, one list of blocks, a head.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fleetune.models.quantized_linear import QuantizedLinear
from fleetune.spec.errors import UserError


@dataclass(frozen=True)
class Anatomy:
    """Names as in `named_modules()` of the transformers model; "" or None where a family has no such part.

    body: the innermost module that makes hidden states of tokens. embedding: the token embedding. positions: a learned position
    embedding. blocks: the ModuleList of blocks. final_norm: the norm behind the blocks. head: the output projection.
    outside: the other modules outside the blocks that hold parameters or buffers themselves (projections around the
    blocks, a norm behind the embedding, rotary frequencies).
    linears: names within a block of linear layers (`nn.Linear`, or transformers' `Conv1D` with its transposed weight) in
    the order in which they are declared, over all kinds of blocks. conv1ds: those of them that are `Conv1D`. bypassed:
    those whose weight a recurrent layer also hands to a fused kernel, past the linear layer and whatever stands in its place.
    experts: names within a block of stacked expert parameters, `[experts, ., .]`: no linear layers of their own.
    recurrent: a block carries a state along the sequence besides attention (a scan, a convolution, an RNN).
    """

    body: str
    embedding: str
    positions: str | None
    blocks: str
    final_norm: str | None
    head: str
    head_tied: bool
    outside: tuple[str, ...]
    linears: tuple[str, ...]
    conv1ds: tuple[str, ...]
    bypassed: tuple[str, ...]
    experts: tuple[str, ...]
    num_blocks: int
    hidden_size: int
    recurrent: bool

    @staticmethod
    def of(model: nn.Module) -> Anatomy:
        """The anatomy of a transformers causal language model (also on the meta device). Raises UserError."""
        return _Search(model).anatomy()

    def block_names(self) -> tuple[str, ...]:
        return tuple(f"{self.blocks}.{index}" for index in range(self.num_blocks))


class _Search:
    """One look at one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = getattr(model, "config", None)
        self.modules = dict(model.named_modules())
        self.kind = type(model).__name__

    def anatomy(self) -> Anatomy:
        config = self.config
        if getattr(config, "is_encoder_decoder", False):
            raise UserError(f"{self.kind} has an encoder and a decoder: give a causal (decoder-only) language model")
        embedding = self.name_of(self.call("get_input_embeddings"))
        head = self.name_of(self.call("get_output_embeddings"))
        blocks = self.find_blocks()
        body = None if blocks is None else self.find_body(blocks)
        missing = [
            f"{self.kind} has no {part} that can be found: give a causal language model of transformers ({hint})"
            for part, found, hint in (
                ("token embedding", embedding, "its get_input_embeddings() names none of its modules"),
                ("output head", head, "its get_output_embeddings() names none; a bare encoder or body has none"),
                ("list of blocks", blocks, "no list of modules is as long as its num_hidden_layers"),
                ("body", body, "no module around its blocks takes input_ids"),
            )
            if found is None
        ]
        if missing:
            raise UserError(*missing)
        assert embedding is not None and head is not None and blocks is not None and body is not None
        linears, conv1ds, experts = self.inside(blocks)
        positions = self.find_positions(blocks, embedding)
        final_norm = self.find_final_norm(blocks)
        known = {embedding, head, positions, final_norm}
        return Anatomy(
            body=body,
            embedding=embedding,
            positions=positions,
            blocks=blocks,
            final_norm=final_norm,
            head=head,
            head_tied=self.modules[head].weight is self.modules[embedding].weight,
            outside=tuple(
                name
                for name, module in self.outside(blocks)
                if name not in known and (_own_parameters(module) or module._buffers)
            ),
            linears=linears,
            conv1ds=conv1ds,
            bypassed=self.find_bypassed(blocks, linears),
            experts=experts,
            num_blocks=len(self.modules[blocks]),  # type: ignore[arg-type]
            hidden_size=int(self.text_config().hidden_size),
            recurrent=self.is_recurrent(blocks),
        )

    def text_config(self) -> Any:
        return self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config

    def call(self, method: str) -> nn.Module | None:
        try:
            return getattr(self.model, method)()
        except (AttributeError, NotImplementedError):
            return None

    def name_of(self, wanted: nn.Module | None) -> str | None:
        if not isinstance(getattr(wanted, "weight", None), nn.Parameter):
            return None
        return next((name for name, module in self.modules.items() if module is wanted), None)

    def find_blocks(self) -> str | None:
        """The outermost ModuleList with as many blocks as the config says; the one with most parameters if several."""
        lists = [name for name, module in self.modules.items() if isinstance(module, nn.ModuleList)]
        outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
        layers = getattr(self.text_config(), "num_hidden_layers", None)
        fitting = [name for name in outermost if len(self.modules[name]) == layers]  # type: ignore[arg-type]
        return max(fitting, key=lambda name: _num_values(self.modules[name]), default=None)

    def find_body(self, blocks: str) -> str | None:
        """The innermost module around the blocks, other than the whole, that takes tokens."""
        name = blocks.rpartition(".")[0]
        while name:
            if "input_ids" in inspect.signature(self.modules[name].forward).parameters:
                return name
            name = name.rpartition(".")[0]
        return None

    def outside(self, blocks: str) -> list[tuple[str, nn.Module]]:
        """Modules that are not within a block and have no children, or parameters of their own, as they were declared."""
        return [
            (name, module)
            for name, module in self.modules.items()
            if not f"{name}.".startswith(f"{blocks}.") and (next(module.children(), None) is None or _own_parameters(module))
        ]

    def find_positions(self, blocks: str, embedding: str) -> str | None:
        found = [n for n, module in self.outside(blocks) if isinstance(module, nn.Embedding) and n != embedding]
        return found[0] if len(found) == 1 else None

    def find_final_norm(self, blocks: str) -> str | None:
        """The norm declared behind the blocks; families that declare it before them have no other norm outside."""
        order = list(self.modules)
        norms = [name for name, module in self.outside(blocks) if _is_norm(module)]
        behind = [name for name in norms if order.index(name) > order.index(blocks)]
        if behind:
            return behind[0]
        return norms[0] if len(norms) == 1 else None

    def inside(self, blocks: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """(linears, conv1ds, experts): names within a block, over all blocks, each once."""
        linears: dict[str, bool] = {}
        experts: dict[str, None] = {}
        for block in self.modules[blocks].children():
            for name, module in block.named_modules():
                if is_linear(module):
                    linears[name] = is_conv1d(module)
                else:
                    stacked = (
                        p for p, value in _own_parameters(module).items() if value.ndim == 3 and not _is_convolution(module)
                    )
                    experts.update(dict.fromkeys(f"{name}.{p}" if name else p for p in stacked))
        return tuple(linears), tuple(name for name, conv in linears.items() if conv), tuple(experts)

    def find_bypassed(self, blocks: str, linears: tuple[str, ...]) -> tuple[str, ...]:
        found = []
        for name in linears:
            path, _, leaf = name.rpartition(".")
            owners = {type(block.get_submodule(path)) for block in self.modules[blocks].children() if _has(block, name)}
            scans = any(
                _is_convolution(child)
                for block in self.modules[blocks].children()
                if _has(block, name)
                for child in block.get_submodule(path).children()
            )
            if scans and any(f"self.{leaf}.weight" in _source(owner) for owner in owners):
                found.append(name)
        return tuple(found)

    def is_recurrent(self, blocks: str) -> bool:
        """transformers says of its classes whether they carry a state; a convolution or RNN in a block shows it too."""
        if getattr(self.model, "_is_stateful", False):
            return True
        return any(_is_convolution(module) or isinstance(module, nn.RNNBase) for module in self.modules[blocks].modules())


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer (GPT-2's) whose weight is [in, out]; or one that was, before it was quantised."""
    if isinstance(module, QuantizedLinear):
        return module.was_conv1d
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def is_linear(module: nn.Module) -> bool:
    """`nn.Linear`, `Conv1D`, a quantised one, or a subclass of `nn.Linear` that computes the same (Falcon's)."""
    if type(module) is nn.Linear or isinstance(module, QuantizedLinear) or is_conv1d(module):
        return True
    return isinstance(module, nn.Linear) and _computes_linear(module)


def _computes_linear(module: nn.Linear) -> bool:
    """Subclasses may compute something else (a router's choice, a quantised product): a tiny one of the class is tried."""
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        tiny = type(module)(3, 2, bias=True)
        x = torch.tensor([[[1.0, -2.0, 0.5]]])
        with torch.no_grad():
            return torch.allclose(tiny(x), nn.functional.linear(x, tiny.weight, tiny.bias))
    except Exception:
        return False


def _has(block: nn.Module, name: str) -> bool:
    try:
        block.get_submodule(name)
    except AttributeError:
        return False
    return True


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except OSError:
        return ""


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d)


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return True
    parameters = _own_parameters(module)
    return all(value.ndim == 1 for value in parameters.values()) and (
        "weight" in parameters or (not module._buffers and "norm" in type(module).__name__.lower())
    )


def _num_values(module: nn.Module) -> int:
    """Of parameters and of quantised weights, which are buffers."""
    return sum(p.numel() for p in module.parameters()) + sum(b.numel() for b in module.buffers())


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in module._parameters.items() if value is not None}
