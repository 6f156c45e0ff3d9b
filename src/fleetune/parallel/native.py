"""The engine in which every rank holds the whole model, and the ranks share the work of a step.

A step: count what is trained on all ranks; forward and backward of each micro-batch, adding into one flat buffer, without
any traffic; one all-reduce of that buffer; norm, check, clip, update, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, final

import torch

from fleetune.models.quantized_linear import resting_parts
from fleetune.parallel.bits import bits_of, fingerprint_of
from fleetune.parallel.engines import Built, EngineRequest
from fleetune.parallel.gradients import FlatGradients
from fleetune.parallel.held import Held, held_by
from fleetune.parallel.loss_scale import LossScale
from fleetune.parallel.optimizer_state import OptimizerFactory, fill_state, find_roles
from fleetune.parallel.ordered import OrderedSum
from fleetune.parallel.out_of_memory import together
from fleetune.parallel.step_counts import check_weight, count_step
from fleetune.parallel.whole_state import fill, shards_of, state_of
from fleetune.parallel.world import World
from fleetune.spec.records import MicroBatch, Shard, ShardReader, StepReport

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel
    from fleetune.models.objective import TokenLoss

#: Runs the model on a micro-batch: (summed loss, fp32 scalar with a gradient; its weight, a number of trained tokens).
Forward = Callable[[MicroBatch], tuple[torch.Tensor, int]]

T = TypeVar("T")


class TrainedModel(Protocol):
    """What the engine must know of a model beside its forward."""

    @property
    def module(self) -> torch.nn.Module:
        """All parameters, frozen ones too."""

    def trained(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) of everything that is trained, each once; fp32, on one device, the same on all ranks."""

    def train(self, mode: bool) -> None:
        """Dropout on, or off."""


@dataclass(frozen=True)
class StepSettings:
    """gradient_clip: the L2 norm that gradients are scaled down to; 0 never. precision: of the forward; `fp16` needs (and
    gets) a scaled loss. The forward itself chooses its dtypes, under autocast or not; trained parameters stay fp32.
    strict: sums over micro-batches are taken in one order, whatever the number of ranks. recovers: where the memory of a rank
    does not hold a step, all raise OutOfMemory before anything has changed.

    accumulate: where ranks keep pieces: `shards` sums each micro-batch's gradients over the ranks and keeps only pieces, `once`
    keeps whole gradients until the last one."""

    gradient_clip: float = 0.0
    precision: str = "fp32"
    accumulate: str = "shards"
    strict: bool = False
    recovers: bool = False


def forward_of(model: CausalModel, objective: TokenLoss) -> Forward:
    """The forward of a causal model under an objective."""

    def forward(micro_batch: MicroBatch) -> tuple[torch.Tensor, int]:
        laid_out = model.lay_out(micro_batch)
        return objective(model.hidden(laid_out), laid_out, model.head)

    return forward


def build(request: EngineRequest) -> Built:
    """The whole model on every rank, and the engine over it."""
    from fleetune.models.objective import TokenLoss
    from fleetune.models.wanted import load_whole

    model = load_whole(request.model, request.world.device)
    forward = forward_of(model, TokenLoss())
    engine = NativeEngine(model, forward, world=request.world, optimizer=request.optimizer, settings=request.settings)
    return Built(model, engine)


@final
class NativeEngine:
    """One model on every rank. All methods are collective; see `fleetune.parallel.engine.Engine`."""

    lockstep = False

    def __init__(
        self,
        model: TrainedModel,
        forward: Forward,
        *,
        world: World,
        optimizer: OptimizerFactory,
        settings: StepSettings,
    ) -> None:
        self._model, self._forward = model, forward
        self._world, self._settings = world, settings
        self._named = tuple(model.trained())
        self._gradients = FlatGradients(self._named)
        self._ordered = OrderedSum(self._gradients.buffer, world) if settings.strict else None
        self._scale = LossScale(enabled=settings.precision == "fp16")
        self._roles = find_roles(optimizer, self._named[0][1].device)
        self._optimizer = optimizer(self._named)
        fill_state(self._optimizer, (parameter for _, parameter in self._named), self._roles)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepReport:
        """One optimizer step over the micro-batches of all ranks; this rank's share may be empty.

        The loss of each micro-batch is divided by the trained tokens of the whole global batch, so that no division of the
        batch changes loss or gradient. Where loss or gradient is not finite, on any rank, nothing is updated on all of them.
        Raises UserError, on all ranks, where the global batch has no trained token; OutOfMemory, on all ranks, where the
        settings ask for it.
        """
        sent = self._world.bytes_sent
        counts = count_step(self._world, micro_batches)
        self._model.train(True)
        self._gradients.zero()
        if self._ordered is None:
            self._gradients.put_loss(self._fitting(micro_batches, counts.trained_tokens))
            self._world.sum_tensor(self._gradients.buffer)
        else:
            self._ordered.reduce(self._one_by_one(micro_batches, counts.trained_tokens))
        loss, scaled_norm = self._gradients.loss_and_norm()
        verdict = self._scale.judge(loss, scaled_norm, clip=self._settings.gradient_clip)
        if verdict.applied:
            self._gradients.multiply(verdict.factor)
            self._update(learning_rate)
        is_bad = not (verdict.applied or verdict.overflow)
        culprits = self._find_culprits(micro_batches, counts.trained_tokens) if is_bad else ()
        return StepReport(
            loss=loss,
            gradient_norm=verdict.norm,
            trained_tokens=counts.trained_tokens,
            tokens=counts.tokens,
            applied=verdict.applied,
            bytes_sent=self._world.bytes_sent - sent,
            overflow=verdict.overflow,
            culprits=culprits,
        )

    def rehearse(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """See the protocol: no rank waits for another before all know whether it fitted."""
        trained_tokens = max(1, sum(batch.num_trained_tokens for batch in micro_batches))
        self._model.train(True)
        self._gradients.zero()
        together(self._world, lambda: self._accumulate(micro_batches, trained_tokens))
        self._gradients.zero()
        return True

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(summed loss, trained tokens) over all ranks. Unequal and empty shares are fine; no state changes."""
        self._model.train(False)
        total, count = self._zero(), 0
        with torch.no_grad():
            for batch in micro_batches:
                if batch.num_trained_tokens:
                    loss, weight = self._run(batch)
                    total += loss
                    count += weight
        loss_sum, counted = self._world.sum([float(total), count])
        return loss_sum, int(counted)

    def shards(self) -> Iterator[Shard]:
        """Parameters and optimizer state; of all tensors in order, this rank writes every world-size-th."""
        yield from shards_of(self._state(), rank=self._world.rank, ranks=self._world.world_size)
        if self._world.rank == 0:
            yield from self._scale.shards()

    def load(self, read: ShardReader) -> None:
        """Restore parameters and optimizer state, each rank all of it. Raises KeyError for what the checkpoint lacks."""
        fill(self._state(), read)
        self._scale.load(read)

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every trained parameter on the CPU, one at a time, in the model's order."""
        for name, parameter in self._named:
            yield name, parameter.detach().cpu()

    def fingerprint(self) -> str:
        """blake2b of names, shapes and bits of all trained parameters."""
        return fingerprint_of(self.full_tensors())

    def live(self, run: Callable[[], T]) -> T:
        return run()

    def held(self) -> Held:
        return held_by((*self._model.module.parameters(), *resting_parts(self._model.module)), self._optimizer)

    def replica(self) -> tuple[str, str]:
        """Every rank holds a copy of everything."""
        return "everything", bits_of((f"{name}/{role}", tensor) for name, role, tensor in self._state())

    def close(self) -> None:
        self._gradients.detach()
        self._optimizer.state.clear()

    def _accumulate(self, micro_batches: Sequence[MicroBatch], trained_tokens: int) -> torch.Tensor:
        """Add this rank's gradients into the buffer; returns its part of the mean loss, float64 scalar on the device."""
        total = self._zero()
        for batch in micro_batches:
            if batch.num_trained_tokens:
                loss, _ = self._run(batch)
                (loss * (self._scale.value / trained_tokens)).backward()
                total += loss.detach()
        return total / trained_tokens

    def _fitting(self, micro_batches: Sequence[MicroBatch], trained_tokens: int) -> torch.Tensor:
        if not self._settings.recovers:
            return self._accumulate(micro_batches, trained_tokens)
        return together(self._world, lambda: self._accumulate(micro_batches, trained_tokens))

    def _one_by_one(self, micro_batches: Sequence[MicroBatch], trained_tokens: int) -> Iterator[int]:
        """The number of each micro-batch, when its gradients alone, and its part of the loss, lie in the buffer."""
        for batch in micro_batches:
            self._gradients.put_loss(self._accumulate([batch], trained_tokens))
            yield batch.number

    def _find_culprits(self, micro_batches: Sequence[MicroBatch], trained_tokens: int) -> tuple[str, ...]:
        """Compute each micro-batch again, alone, to name those, of all ranks, whose loss or gradient is not finite."""
        found = []
        for batch in micro_batches:
            self._gradients.zero()
            self._gradients.put_loss(self._accumulate([batch], trained_tokens))
            loss, norm = self._gradients.loss_and_norm()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
                found.append(f"rank {self._world.rank}, micro-batch {batch.number} ({what}): {', '.join(batch.samples[:4])}")
        return tuple(line for lines in self._world.gather_json(found) for line in lines)

    def _run(self, batch: MicroBatch) -> tuple[torch.Tensor, int]:
        loss, weight = self._forward(batch)
        check_weight(batch, weight)
        return loss, weight

    def _update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def _zero(self) -> torch.Tensor:
        """Where losses are summed: a float64 scalar on the device, so that no micro-batch waits for it."""
        return torch.zeros((), dtype=torch.float64, device=self._gradients.buffer.device)

    def _state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        return state_of(self._named, self._optimizer, self._roles)
