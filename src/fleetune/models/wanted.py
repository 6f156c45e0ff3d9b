"""Which model is wanted for training, as plain values, and the usual way to get it: whole, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fleetune.models.adapters import add_adapter, load_adapter
from fleetune.models.build import PRECISIONS, load_model
from fleetune.models.causal import CausalModel
from fleetune.models.lora import AdapterKind
from fleetune.spec.stages import Stage


@dataclass(frozen=True)
class WantedAdapter:
    """A new adapter. targets: names of linear layers; empty: all of the blocks'."""

    kind: AdapterKind
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class WantedModel:
    """A model folder and what is trained of it.

    precision: fp32, bf16 or fp16. adapter: a new one, and adapter_folder: one to go on with; with neither, all weights are
    trained. quantized: a folder of `prepare_quantized`, for the frozen linear layers. seed: of new weights and of dropouts.
    fast: see `CausalModel`.
    """

    folder: Path
    precision: str
    adapter: WantedAdapter | None = None
    adapter_folder: Path | None = None
    quantized: Path | None = None
    allow_remote_code: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0
    fast: bool = True

    @property
    def is_full(self) -> bool:
        return self.adapter is None and self.adapter_folder is None

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]


def load_whole(wanted: WantedModel, device: torch.device) -> CausalModel:
    """The whole model on one device: frozen with its adapter, or all of it trainable. One process, no collective."""
    return _load(wanted, device, None)


def load_stage(wanted: WantedModel, device: torch.device, stage: Stage) -> CausalModel:
    """The blocks of one stage on a device; of the others, names and shapes. One process, no collective."""
    return _load(wanted, device, stage)


def _load(wanted: WantedModel, device: torch.device, stage: Stage | None) -> CausalModel:
    model = load_model(
        wanted.folder,
        dtype=wanted.dtype,
        device=device,
        allow_remote_code=wanted.allow_remote_code,
        trainable=wanted.is_full,
        gradient_checkpointing=wanted.gradient_checkpointing,
        seed=wanted.seed,
        quantized=wanted.quantized,
        stage=stage,
        fast=wanted.fast,
    )
    return model if wanted.is_full else adapted(model, wanted)


def adapted(model: CausalModel, wanted: WantedModel) -> CausalModel:
    """The same model, frozen, with the wanted adapter in it."""
    if wanted.adapter_folder is not None:
        return load_adapter(model, wanted.adapter_folder, trainable=True)
    new = wanted.adapter
    assert new is not None
    return add_adapter(
        model, adapter=new.kind, rank=new.rank, alpha=new.alpha, dropout=new.dropout, targets=new.targets, seed=wanted.seed
    )
