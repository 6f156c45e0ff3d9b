"""The engine in which DeepSpeed spreads the training state over the ranks: ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).

Stage 0 keeps everything on every rank, stage 1 splits the optimizer's state, stage 2 the gradients too, stage 3 the parameters
too. What is trained stays fp32, and the forward chooses its own precision, so that losses, gradients and checkpoints are those
of the other engines; fp16 is scaled here. DeepSpeed averages gradients over ranks and knows nothing of tokens: each loss is the
sum over its trained tokens, divided by those of the whole global batch, times the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import nn

from fleetune.models.quantized_linear import resting_parts
from fleetune.parallel import zero_library as library
from fleetune.parallel.bits import bits_of, fingerprint_of
from fleetune.parallel.engines import Built, EngineRequest
from fleetune.parallel.held import Held
from fleetune.parallel.loss_scale import LossScale
from fleetune.parallel.native import Forward, StepSettings, TrainedModel, forward_of
from fleetune.parallel.optimizer_state import OptimizerFactory
from fleetune.parallel.step_counts import check_weight, count_step
from fleetune.parallel.world import World
from fleetune.parallel.zero_settings import ZeroSettings, deepspeed_config, scaling_of
from fleetune.parallel.zero_state import Holding, Pieces, Split, Whole, fill_moments, load_into, shape_of, shards_of
from fleetune.spec.records import MicroBatch, Shard, ShardReader, StepReport

T = TypeVar("T")

#: Two tokens of which one is trained: what a rank runs, times zero, while the others still have micro-batches.
_DUMMY = MicroBatch(
    step=0,
    number=0,
    sequences=(0,),
    tokens=np.zeros(2, dtype=np.int64),
    trained=np.array([False, True]),
    document_bounds=np.array([0, 2]),
    sequence_bounds=np.array([0, 1]),
    samples=("none:0",),
)


def build(request: EngineRequest) -> Built:
    """The whole model on every rank, which DeepSpeed then spreads, and the engine over it."""
    from fleetune.models.objective import TokenLoss
    from fleetune.models.wanted import load_whole

    assert request.zero is not None
    model = load_whole(request.model, request.world.device)
    if request.zero.stage == 3:
        model.separate_inputs()
    engine = ZeroEngine(
        model,
        forward_of(model, TokenLoss()),
        world=request.world,
        optimizer=request.optimizer,
        settings=request.settings,
        zero=request.zero,
    )
    return Built(model, engine)


@final
class ZeroEngine:
    """A model whose training state DeepSpeed keeps. All methods are collective; see `fleetune.parallel.engine.Engine`."""

    def __init__(
        self,
        model: TrainedModel,
        forward: Forward,
        *,
        world: World,
        optimizer: OptimizerFactory,
        settings: StepSettings,
        zero: ZeroSettings,
    ) -> None:
        self._model, self._world, self._settings, self._stage = model, world, settings, zero.stage
        self._named = tuple(model.trained())
        self._scale = LossScale(enabled=settings.precision == "fp16", scaling=scaling_of(zero.options.get("fp16", {})))
        self._traffic = library.start(world)
        config = deepspeed_config(zero, settings, world_size=world.world_size)
        made = optimizer(self._named)  # before parameters are split: it looks at their shapes
        if zero.cpu_adam:
            made = library.cpu_adam(made.param_groups)
        step_module = _Forward(model.module, forward)
        if zero.stage == 3:
            library.split_parameters(step_module, config)
        self._engine = library.make_engine(step_module, made, [p for _, p in self._named], config)
        self._optimizer: torch.optim.Optimizer = made
        self._holding = self._hold()
        fill_moments(self._holding, made, 0 if zero.cpu_adam else torch.zeros((), device=self._holding.flats()[0].device))
        if zero.stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepReport:
        """One optimizer step over the micro-batches of all ranks; this rank's share may be empty.

        Where the gradient is not finite, on any rank, nothing is updated on all of them, and the norm that is told is not
        finite either. Raises UserError, on all ranks, where the global batch has no trained token.
        """
        sent = self._world.bytes_sent + self._traffic.bytes_sent
        counts = count_step(self._world, micro_batches)
        self._engine.train(True)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self._accumulate(micro_batches, counts.trained_tokens)
        norm, applied = self._update()
        (loss,) = self._world.sum([loss])
        overflow = self._scale.enabled and math.isfinite(loss) and not applied
        self._scale.update(math.isfinite(norm))
        return StepReport(
            loss=loss,
            gradient_norm=norm,
            trained_tokens=counts.trained_tokens,
            tokens=counts.tokens,
            applied=applied,
            bytes_sent=self._world.bytes_sent + self._traffic.bytes_sent - sent,
            overflow=overflow,
        )

    def rehearse(self, micro_batches: Sequence[MicroBatch]) -> bool:
        return False  # ranks meet in the middle of a forward: one that runs out of memory there leaves the others waiting

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(summed loss, trained tokens) over all ranks. Unequal and empty shares are fine; no state changes."""
        self._engine.train(False)
        total, count = 0.0, 0
        with torch.no_grad():
            for batch, weight in self._padded(micro_batches, at_least=0, equal=self._stage == 3):
                loss = self._engine(batch)
                if weight:
                    total += float(loss)
                    count += weight
        loss_sum, counted = self._world.sum([total, count])
        return loss_sum, int(counted)

    def shards(self) -> Iterator[Shard]:
        """This rank's pieces of parameters and optimizer state. Nothing is gathered."""
        yield from shards_of(
            self._named, self._holding, self._optimizer, rank=self._world.rank, world_size=self._world.world_size
        )
        if self._world.rank == 0:
            yield from self._scale.shards()

    def load(self, read: ShardReader) -> None:
        """Restore everything, from a checkpoint of any engine. Raises KeyError for what the checkpoint lacks."""
        load_into(self._named, self._holding, self._optimizer, read)
        self._scale.load(read)

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every trained parameter on the CPU, one at a time, in the model's order; under stage 3 put together for it."""
        for name, parameter in self._named:
            value = library.whole(parameter) if self._stage == 3 else parameter.detach()
            yield name, value.cpu()

    def fingerprint(self) -> str:
        """blake2b of names, shapes and bits of all trained parameters."""
        return fingerprint_of(self.full_tensors())

    @property
    def lockstep(self) -> bool:
        """Under stage 3 every layer is put together by all ranks."""
        return self._stage == 3

    def live(self, run: Callable[[], T]) -> T:
        """Run what runs the model; under stage 3 inside a forward, where layers are put together."""
        with torch.no_grad():
            result: T = self._engine.module(run) if self._stage == 3 else run()
        return result

    def held(self) -> Held:
        """Under stage 3 a parameter counts as the piece of it that is kept; small ones are whole between the steps as well.
        What stages 1 and 2 and offload copy of the parameters for the optimizer counts as its own."""
        parameters = [parameter for _, parameter in self._model.module.named_parameters()]
        kept = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]
        flats = self._holding.flats()
        moments = [value for flat in flats for value in self._optimizer.state[flat].values() if _is_moment(value)]
        pointers = {piece.untyped_storage().data_ptr() for piece in kept}
        copies = [flat for flat in flats if flat.untyped_storage().data_ptr() not in pointers]
        return Held(
            parameter_bytes=sum(num_bytes(piece) for piece in (*kept, *resting_parts(self._model.module))),
            optimizer_bytes=sum(num_bytes(tensor) for tensor in (*moments, *copies)),
            trained_parameters=sum(torch.Size(shape_of(parameter)).numel() for _, parameter in self._named),
            trained_here=sum(flat.numel() for flat in flats),
        )

    def replica(self) -> tuple[str, str]:
        """Up to stage 2 every rank holds all parameters; what only one rank holds is compared with nothing."""
        if self._stage == 3:
            return f"the pieces of rank {self._world.rank}", ""
        return "parameters", bits_of((name, parameter) for name, parameter in self._named)

    def close(self) -> None:
        self._engine.destroy()
        self._optimizer.state.clear()

    def _hold(self) -> Holding:
        if self._stage == 0:
            return Whole(self._named, self._optimizer, rank=self._world.rank, world_size=self._world.world_size)
        return Pieces(self._engine.optimizer) if self._stage == 3 else Split(self._engine.optimizer)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], trained_tokens: int) -> float:
        """Forward and backward of this rank's share; returns its part of the mean loss."""
        scale = self._divisor
        if self._stage:
            self._engine.optimizer.override_loss_scale(scale)
            scale = 1.0
        batches = self._padded(micro_batches, at_least=1, equal=self._stage >= 2)
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        is_once = self._stage >= 2 and self._settings.accumulate == "once"
        with self._engine.coalesce_grad_reduction() if is_once else nullcontext():
            for number, (batch, weight) in enumerate(batches):
                if not is_once:
                    self._engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
                loss = self._engine(batch)
                share = self._world.data_ranks * scale / trained_tokens if weight else 0.0
                self._engine.backward(loss * share, scale_wrt_gas=False)
                if weight:
                    total += loss.detach()
        if is_once:
            self._engine.set_gradient_accumulation_boundary(True)
        return float(total / trained_tokens)

    @property
    def _divisor(self) -> float:
        """What gradients must be divided by before they are applied. In fp16 the ranks by which each loss is multiplied are
        taken from the scale, so that it overflows where it would in one process."""
        return self._scale.value / self._world.data_ranks if self._scale.enabled else 1.0

    def _update(self) -> tuple[float, bool]:
        """(L2 norm of the gradient before clipping, whether it was applied)."""
        if self._stage:
            self._engine.step()
            return float(self._engine.get_global_grad_norm()), bool(self._engine.was_step_applied())
        gradients = [parameter.grad for _, parameter in self._named if parameter.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        norm = float(torch.linalg.vector_norm(norms.double())) / self._divisor
        applied = math.isfinite(norm)
        if applied:
            clip = self._settings.gradient_clip
            shrink = clip / norm if 0 < clip < norm else 1.0
            torch._foreach_mul_(gradients, shrink / self._divisor)
            self._engine.step()
        else:
            self._engine.zero_grad()
        return norm, applied

    def _padded(self, micro_batches: Sequence[MicroBatch], *, at_least: int, equal: bool) -> list[tuple[MicroBatch, int]]:
        """This rank's micro-batches with their trained tokens. Those without any are left out, and a dummy of weight 0 fills up
        to `at_least`, or where every forward and backward is a collective, to the largest share."""
        batches = [(batch, batch.num_trained_tokens) for batch in micro_batches if batch.num_trained_tokens]
        length = max(len(batches), at_least)
        if equal:
            length = int(self._world.max([length])[0])
        return batches + [(_DUMMY, 0)] * (length - len(batches))


@final
class _Forward(nn.Module):
    """The forward with its loss, as the module that DeepSpeed wraps."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, task: MicroBatch | Callable[[], Any]) -> Any:
        """The summed loss of a micro-batch; or whatever a function gives that runs the model inside."""
        if not isinstance(task, MicroBatch):
            return task()
        loss, weight = self._forward(task)
        check_weight(task, weight)
        return loss


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_moment(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0
