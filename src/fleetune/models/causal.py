"""A causal language model on one device, as the engines use it: documents in, hidden states of what is trained out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fleetune.models import attention
from fleetune.models.adapter_files import save_adapter
from fleetune.models.anatomy import Anatomy
from fleetune.models.dropout import Randomness
from fleetune.models.full_files import save_full
from fleetune.models.head import Head
from fleetune.models.layout import LaidOut, Layout, lay_out
from fleetune.models.lora import LoraLinear
from fleetune.models.probe import Traits, body_of, hidden_of, set_attention, using_attention
from fleetune.models.quantized_files import QuantisedUnder
from fleetune.models.quantized_linear import parts_bytes, quantized_layers
from fleetune.models.rotary import LengthSwitch
from fleetune.spec.records import MicroBatch

if TYPE_CHECKING:
    from fleetune.models.lora import AdapterSettings
    from fleetune.models.part import ModelPart


class CausalModel:
    """A transformers module with its anatomy. Made by `load_model`; `add_adapter` and `load_adapter` put an adapter in.

    module: the transformers model; its adapter's layers stand in the places of linear layers.
    layout: the layout that `lay_out` uses (see `choose_layout`).
    compute_dtype: of the forward. Where trained weights are fp32 masters and it is another, `hidden` runs under autocast.
    adapter: settings of the adapter, or None. folder: where the base model's files lie. fast: use operations of ours; else the
    family's own attention on rows, its own layers, and plain products.
    """

    def __init__(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        traits: Traits,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        randomness: Randomness,
        folder: Path,
        fast: bool = True,
    ) -> None:
        self.module = module
        self.fast = fast
        self.anatomy = anatomy
        self.traits = traits
        self.compute_dtype = compute_dtype
        self.device = device
        self.randomness = randomness
        self.folder = folder
        self.adapter: AdapterSettings | None = None
        #: Whole shapes of the parameters by name: an engine may cut them later.
        self.whole_shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        #: Where only some of the blocks lie on this rank: what lets a forward run through those alone.
        self.part: ModelPart | None = None
        self._has_masters = module.get_submodule(anatomy.embedding).weight.dtype == torch.float32
        self._own_attention = str(module.config._attn_implementation)
        self._attention_of_rows = self._own_attention
        self._length_switch = LengthSwitch.of(module.config)
        self.layout: Layout = "documents"
        self.use_layout(choose_layout(traits, fast=fast))

    def use_layout(self, layout: Layout) -> None:
        """Use a layout from now on. Raises ValueError for `flat` where the family's attention cannot do it."""
        if layout == "flat" and not self.traits.flat:
            raise ValueError(f"{type(self.module).__name__} has no flat layout: {self.traits.not_flat}")
        self.layout = layout
        set_attention(self.module, attention.NAME if layout == "flat" else self._attention_of_rows)

    def separate_inputs(self) -> None:
        """Have each adapted layer compute by itself: for whoever puts a layer's weights together when it alone is called."""
        for part in self.module.modules():
            if isinstance(part, LoraLinear):
                part.shared = None

    def use_keyed_attention(self) -> None:
        """In the documents layout, attend where dropout of probabilities can be keyed: not inside a fused kernel."""
        self._attention_of_rows = "eager"
        self.use_layout(self.layout)

    @contextmanager
    def own_attention(self) -> Iterator[nn.Module]:
        """The plain transformers module, for `generate` and for whoever calls it without a `LaidOut`."""
        with using_attention(self.module, self._own_attention):
            yield self.module

    def lay_out(self, micro_batch: MicroBatch, device: torch.device | None = None) -> LaidOut:
        """A micro-batch as tensors on the model's device, in the model's layout. Raises UserError (see `LengthSwitch`)."""
        if self._length_switch is not None:
            self._length_switch.check(np.diff(micro_batch.document_bounds))
        return lay_out(micro_batch, self.layout, self.device if device is None else device)

    def hidden(self, laid_out: LaidOut) -> torch.Tensor:
        """[N, H]: what the head is given at exactly the N positions that predict a trained token."""
        return self.states(laid_out, to_head=self.traits.through_head).flatten(0, 1).index_select(0, laid_out.select)

    def states(self, laid_out: LaidOut, *, to_head: bool) -> torch.Tensor:
        """[R, C, H]: what comes out of the body, or what the head is given."""
        options: dict[str, Any] = {}
        if laid_out.layout == "flat":
            options = {"position_ids": laid_out.positions, "laid_out": laid_out, "randomness": self.randomness}
        with self.randomness.about(laid_out), self._autocast():
            if to_head:
                return self._at_head(laid_out.tokens, options)
            return hidden_of(body_of(self.module, self.anatomy)(input_ids=laid_out.tokens, use_cache=False, **options))

    @property
    def head(self) -> Head:
        module = self.module.get_submodule(self.anatomy.head)
        return Head(module.weight, module.bias, self.compute_dtype, self.traits.scale, self.traits.softcap, self.fast)  # type: ignore[arg-type]

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Of the hidden states between blocks."""
        weight: Any = self.module.get_submodule(self.anatomy.embedding).weight
        return weight.dtype

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [N, V] of hidden states [N, H]. All of them exist: give a few rows at a time."""
        return self.head.logits(hidden)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of everything that is trained and lies on this rank, each once, in the module's order."""
        trained = ((name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad)
        return ((name, parameter) for name, parameter in trained if not parameter.is_meta)

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of everything that is trained on any rank, by name, in the module's order."""
        named = self.module.named_parameters()
        return {name: tuple(parameter.shape) for name, parameter in named if parameter.requires_grad}

    def save(self, tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, *, base_model: str) -> set[str]:
        """Write what was trained as plain files; returns the names of the tensors in them. One process calls it.

        tensors: (name, whole tensor) of everything that is trained, in any order. With an adapter: a folder for PEFT,
        which finds `base_model` (a hub id or a folder) again. Else: a folder for transformers, weights in fp32 as they
        were trained. Raises ValueError when one is absent, empty or not finite.
        """
        if self.adapter is not None:
            names = save_adapter(tensors, folder, self.adapter, base_model_name=base_model)
            if self.scheme is not None:
                QuantisedUnder(self.scheme, self.precision).write(folder)
            return names
        return save_full(self.module, tensors, folder, source=self.folder, shapes=self.whole_shapes)

    @property
    def scheme(self) -> str | None:
        """How the linear layers' weights rest (int8, nf4), or None where they are not quantised."""
        return next((layer.scheme for layer in quantized_layers(self.module).values()), None)

    @property
    def precision(self) -> str:
        """The compute type's short name: fp32, bf16 or fp16."""
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.compute_dtype]

    def held_bytes(self) -> int:
        """Bytes of everything that this process holds of the model: parameters, and weights that rest quantised."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters()) + parts_bytes(self.module)

    def saved_bytes(self) -> int:
        """Bytes that the quantised weights would take more in the compute type."""
        layers = quantized_layers(self.module).values()
        return sum(layer.out_features * layer.in_features * layer.dtype.itemsize for layer in layers) - parts_bytes(self.module)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()

    def _at_head(self, tokens: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """[R, C, H] at the head's door, of a family that changes them behind its body. The head itself sees one column."""
        seen: list[torch.Tensor] = []

        def at_door(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            seen.append(args[0])
            return (args[0][:, :1], *args[1:])

        hook = self.module.get_submodule(self.anatomy.head).register_forward_pre_hook(at_door)
        try:
            self.module(input_ids=tokens, use_cache=False, **options)
        finally:
            hook.remove()
        return seen[0]

    def _autocast(self) -> torch.autocast:
        masters = self.compute_dtype != torch.float32 and self._has_masters
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=masters)


def choose_layout(traits: Traits, *, fast: bool) -> Layout:
    """The one place where a layout is chosen: the flat one, without padding, wherever it is exact and wished for."""
    return "flat" if traits.flat and fast else "documents"
