"""What is put around and into the blocks: keyed dropouts in the places of the model's own, and gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from fleetune.models.dropout import KeyedDropout, Randomness
from fleetune.models.fast import replace_operations
from fleetune.spec.errors import raise_if_any

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel

#: Config values that draw from the process's random state in another way than dropout.
_OTHER_NOISE = ("layerdrop", "layer_drop", "router_jitter_noise", "drop_path_rate", "stochastic_depth_rate")
_HEADS_OF_OTHER_TASKS = ("classifier_", "summary_", "classification_")


def prepare_blocks(model: CausalModel, *, gradient_checkpointing: bool) -> None:
    """Make the training forward of `model` fast and a function of its keys alone, and keep or recompute activations."""
    refuse_other_noise(model.module)
    if model.fast:
        replace_operations(model.module)
    replace_dropouts(model.module, model.randomness)
    model.randomness.functional = calls_dropout_itself(model.module)
    if model.randomness.functional:
        model.use_keyed_attention()
    if model.randomness.functional or gradient_checkpointing:
        for name in model.anatomy.block_names():
            block = model.module.get_submodule(name)
            block.forward = _BlockForward(block.forward, name, model.randomness, gradient_checkpointing)


def replace_dropouts(module: nn.Module, randomness: Randomness) -> None:
    """Every `nn.Dropout` that drops anything becomes a keyed one, named by its place."""
    for name, dropout in list(module.named_modules()):
        if type(dropout) is nn.Dropout and dropout.p > 0:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, KeyedDropout(dropout.p, name, randomness))


def calls_dropout_itself(module: nn.Module) -> bool:
    """Whether the model may call dropout as a function: a rate above 0 is among its modules' or its config's values.

    A dropout module's rate may be read and handed to an attention function, so one that was replaced counts too.
    """
    config = vars(module.config) if hasattr(module, "config") else {}
    rates = [config, *(vars(owner) for owner in module.modules())]
    return any(
        "drop" in name and not name.startswith(_HEADS_OF_OTHER_TASKS) and isinstance(rate, float) and rate > 0
        for values in rates
        for name, rate in values.items()
    ) or any(isinstance(owner, KeyedDropout) for owner in module.modules())


def refuse_other_noise(module: nn.Module) -> None:
    config: Any = getattr(module, "config", None)
    raise_if_any(
        [
            f"config.json has {name} {value}: it draws from the process's random state, so that no run could be repeated; "
            f"set {name} to 0 in config.json"
            for name in _OTHER_NOISE
            if isinstance(value := getattr(config, name, None), float) and value > 0
        ]
    )


class _BlockForward:
    """A block's forward with its functional dropouts counted from its start, and recomputed in the backward if asked.

    It takes the place of the instance's `forward`, so that hooks on the block (FSDP's) stay outside of the recomputation.
    """

    def __init__(self, forward: Callable, name: str, randomness: Randomness, recompute: bool) -> None:
        self._forward = forward
        self._name = name
        self._randomness = randomness
        self._recompute = recompute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        self._randomness.enter_block(self._name)
        if not (self._recompute and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        return checkpoint(
            self._forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts, **kwargs
        )

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), self._randomness.about(self._randomness.laid_out, self._name)
