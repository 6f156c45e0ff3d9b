"""`TuringLightningModule`: a model and its rows under a person's own `pl.Trainer`, with whatever strategy that has.

It runs under `ddp` and under `ModelParallelStrategy` (the blocks of a frozen model with an adapter are sharded), on CPUs too,
where both need `process_group_backend="gloo"`. `DeepSpeedStrategy` and `FSDPStrategy` need GPUs: Lightning itself refuses them
without, when it is to train. On a CPU, give `strategy="ddp"`, or train with fleetune itself, whose engines all run there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch

from fleetune.bridges.xturing.config import fields_of
from fleetune.bridges.xturing.datasets import fields_of as rows_of
from fleetune.bridges.xturing.models import Model, create_model
from fleetune.data.loader import Loader
from fleetune.data.plan import plan_run
from fleetune.data.prepare import prepare_data
from fleetune.data.request import DataRequest
from fleetune.data.store import TokenStore
from fleetune.models.adapters import add_adapter
from fleetune.models.build import load_model
from fleetune.models.objective import TokenLoss
from fleetune.spec.batches import divide
from fleetune.spec.errors import UserError
from fleetune.spec.given import arguments_given, preset_given
from fleetune.spec.read import resolve
from fleetune.spec.records import MicroBatch
from fleetune.spec.run_spec import RunSpec
from fleetune.training.optimizers import OPTIMIZERS, AdamWSettings
from fleetune.training.schedules import DEFAULT_LEARNING_RATE
from fleetune.training.sources import ModelRequest, ModelSource, prepare_source, rows_fingerprint, tokenizer_of

try:
    from lightning.pytorch import LightningModule
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "TuringLightningModule needs the package lightning, which is not installed: pip install 'fleetune[lightning]'",
        name="lightning",
    ) from missing


@final
class TuringLightningModule(LightningModule):
    """model: a key, or a model of `create_model`, whose config counts. train_dataset: in any form that `finetune` takes.

    batch_size, learning_rate, optimizer_name: instead of the config's. saved_path: where rank 0 writes the result at the end,
    for plain peft or transformers. Epochs, accumulation, clipping and precision are the Trainer's.
    """

    def __init__(
        self,
        model: str | Model,
        train_dataset: Any,
        *,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        optimizer_name: str | None = None,
        saved_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        chosen = create_model(model) if isinstance(model, str) else model
        asked = {"micro_batch_size": batch_size, "learning_rate": learning_rate, "optimizer": optimizer_name}
        given = {**fields_of(chosen.finetuning_config(), set()), **{name: value for name, value in asked.items() if value}}
        preset = preset_given(chosen.key, chosen.preset_values)
        self._spec: RunSpec = resolve(
            flags=arguments_given({"model": chosen.weights, **rows_of(train_dataset), **given}), preset=preset
        ).spec
        self._saved_path = None if saved_path is None else Path(saved_path)
        self._objective = TokenLoss()
        self._causal: Any = None

    def prepare_data(self) -> None:
        """Weights and tokenised rows, once a node (Lightning calls it so)."""
        self._rows(self._source())

    def configure_model(self) -> None:
        """Load the model on every rank, and shard its blocks where the strategy has a mesh for it."""
        if self._causal is not None:
            return
        spec, adaptation = self._spec, self._spec.adaptation
        source = self._source()
        is_full = adaptation.method == "full"
        self._causal = load_model(
            source.folder,
            dtype=source.precision,
            device=self.trainer.strategy.root_device,
            trainable=is_full,
            gradient_checkpointing=spec.optimization.gradient_checkpointing,
            fast=spec.optimization.fast == "on",
            seed=spec.optimization.seed,
        )
        if not is_full:
            self._causal = add_adapter(
                self._causal,
                adapter=adaptation.adapter,
                rank=adaptation.lora_rank,
                alpha=adaptation.lora_alpha,
                dropout=adaptation.lora_dropout,
                targets=adaptation.lora_targets,
                seed=spec.optimization.seed,
            )
        self.module = self._causal.module
        for parameter in self.module.parameters():
            # Frozen weights are mapped files, which a strategy that sends weights to all ranks may not write into.
            parameter.data = parameter.data.clone()
        if self.device_mesh is not None:
            self._shard(is_full)

    def training_step(self, batch: MicroBatch, index: int) -> torch.Tensor:
        """The loss of this rank's part of the mean over all ranks' trained tokens: strategies average over ranks."""
        laid_out = self._causal.lay_out(batch, self.device)
        loss_sum, weight = self._objective(self._causal.hidden(laid_out), laid_out, self._causal.head)
        counted = torch.tensor(float(weight), device=self.device)
        total = self.trainer.strategy.reduce(counted, reduce_op="sum") if self.trainer.world_size > 1 else counted
        loss = loss_sum * (self.trainer.world_size / torch.as_tensor(total).clamp(min=1))
        self.log("loss", loss.detach(), prog_bar=True, sync_dist=self.trainer.world_size > 1)
        return loss

    def configure_optimizers(self) -> Any:
        optimization = self._spec.optimization
        settings = AdamWSettings(optimization.beta1, optimization.beta2, optimization.epsilon, optimization.weight_decay)
        optimizer = OPTIMIZERS[optimization.optimizer](settings)(list(self._causal.trained()))
        rate = optimization.learning_rate or DEFAULT_LEARNING_RATE[self._spec.adaptation.method]
        for group in optimizer.param_groups:
            group["lr"] = rate
        return optimizer

    def train_dataloader(self) -> Any:
        """This rank's micro-batches of every full step, in the order of fleetune's own plan."""
        store = TokenStore.open(self._rows(self._source()).store)
        size = self._spec.optimization.micro_batch_size or 1
        return torch.utils.data.DataLoader(
            _Steps(store, size, self.trainer.world_size, self.trainer.global_rank, self._spec), batch_size=None
        )

    def transfer_batch_to_device(self, batch: MicroBatch, device: torch.device, dataloader_idx: int) -> MicroBatch:
        return batch  # `lay_out` brings it there

    def on_train_end(self) -> None:
        if self._saved_path is None:
            return
        tensors = [(name, _whole(parameter.detach()).cpu()) for name, parameter in self._causal.trained()]
        if self.trainer.is_global_zero:
            source = self._source()
            self._saved_path.mkdir(parents=True, exist_ok=True)
            self._causal.save(tensors, self._saved_path, base_model=source.hub_id or str(source.folder))
            tokenizer_of(source, self._request()).save_pretrained(self._saved_path)

    def _shard(self, is_full: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        if is_full:
            raise UserError(
                "ModelParallelStrategy shards the blocks here, and method full trains what lies outside of them too: train an "
                "adapter (a _lora preset), give strategy='ddp', or train with fleetune itself and --shard"
            )
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in self.module.get_submodule(self._causal.anatomy.blocks):  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)

    def _request(self) -> ModelRequest:
        weights = self._spec.weights
        return ModelRequest(model=weights.model, trainable=self._spec.adaptation.method == "full", precision=weights.precision)

    def _source(self) -> ModelSource:
        return prepare_source(self._request(), device="cuda" if torch.cuda.is_available() else "cpu")

    def _rows(self, source: ModelSource) -> Any:
        request = self._request()
        asked = DataRequest.of_rows(
            self._spec.rows,
            tokenizer_fingerprint=rows_fingerprint(source, request),
            seed=self._spec.optimization.seed,
        )
        return prepare_data(asked, lambda: tokenizer_of(source, request))


class _Steps(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """The micro-batches of one epoch on one rank: one for each full step, so that all ranks have as many."""

    def __init__(self, store: TokenStore, size: int, world_size: int, rank: int, spec: RunSpec) -> None:
        self._store, self._rank = store, rank
        self._batches = divide(size * world_size, size, world_size)
        self._num_steps = store.num_sequences // self._batches.global_batch_size
        self._seed = spec.optimization.seed
        if not self._num_steps:
            raise UserError(
                f"{store.num_sequences} sequences do not fill one step of {world_size} ranks with batch_size {size}: give more "
                "rows, or a smaller batch_size"
            )

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[MicroBatch]:
        plan = plan_run(
            self._store.num_sequences,
            seed=self._seed,
            global_batch_size=self._batches.global_batch_size,
            epochs=1.0,
            max_steps=self._num_steps,
            first_step=0,
            first_position=0,
        )
        with Loader(self._store, plan, self._batches, self._rank, num_workers=1) as loader:
            for step in loader:
                yield from step.micro_batches


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together, on all ranks; another one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
