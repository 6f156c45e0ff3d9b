"""The engine in which the blocks of the model lie on several ranks, one run behind the other.

A step: count what is trained on all ranks; run the micro-batches of each data rank through its stages; sum the gradients
over data ranks, and those of weights that several stages hold over these; agree on loss and norm; clip, update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist

from fleetune.parallel.bits import bits_of, fingerprint_of
from fleetune.parallel.engines import Built, EngineRequest
from fleetune.parallel.held import Held, held_by
from fleetune.parallel.loss_scale import LossScale
from fleetune.parallel.native import StepSettings
from fleetune.parallel.optimizer_state import OptimizerFactory, fill_state, find_roles
from fleetune.parallel.pipe import Pipe, StageForwards, Wire
from fleetune.parallel.stage_gradients import Holders, StageGradients, ranks_with
from fleetune.parallel.step_counts import count_step
from fleetune.parallel.whole import gathered
from fleetune.parallel.whole_state import fill, shards_of, state_of
from fleetune.parallel.world import World
from fleetune.spec.records import MicroBatch, Shard, ShardReader, StepReport
from fleetune.spec.stages import Stage

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel
    from fleetune.models.layout import LaidOut
    from fleetune.models.objective import TokenLoss

T = TypeVar("T")


def build(request: EngineRequest) -> Built:
    """The blocks of one stage on every rank, and the engine over them."""
    from fleetune.models.objective import TokenLoss
    from fleetune.models.wanted import load_stage

    world, settings = request.world, request.pipe
    assert settings is not None
    stage = Stage.of_rank(world.coordinates.pipeline, world.layout.pipeline, settings.schedule)
    model = load_stage(request.model, world.device, stage)
    pipe = Pipe(
        stage,
        forwards_of(model, TokenLoss()),
        wire=Wire(settings.micro_batch_tokens, model.anatomy.hidden_size, model.hidden_dtype),
        schedule=settings.schedule,
        group=world.mesh["pipeline"].get_group(),
        device=world.device,
    )
    engine = PipelinedEngine(model, pipe, world=world, optimizer=request.optimizer, settings=request.settings)
    return Built(model, engine, partial(gathered, request.model, engine, world))


def forwards_of(model: CausalModel, objective: TokenLoss) -> StageForwards:
    """The forwards of a model of which a part lies here."""
    part = model.part
    assert part is not None

    def through(place: int, laid_out: LaidOut, states: torch.Tensor | None) -> torch.Tensor:
        return part.run(laid_out, part.runs[place], states)

    def loss(place: int, laid_out: LaidOut, states: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        return objective(through(place, laid_out, states), laid_out, model.head)

    return StageForwards(through, loss)


@final
class PipelinedEngine:
    """One stage of the model on every rank. All methods are collective; see `fleetune.parallel.engine.Engine`."""

    lockstep = False

    def __init__(
        self,
        model: CausalModel,
        pipe: Pipe,
        *,
        world: World,
        optimizer: OptimizerFactory,
        settings: StepSettings,
    ) -> None:
        self._model, self._pipe = model, pipe
        self._world, self._settings = world, settings
        self._named = tuple(model.trained())
        self._holders = Holders.gather(world, [name for name, _ in self._named])
        data_group = world.mesh["replicate"].get_group() if world.layout.replicate > 1 else None
        self._gradients = StageGradients(self._named, self._holders, world=world, data_group=data_group)
        self._scale = LossScale(enabled=settings.precision == "fp16")
        self._roles = find_roles(optimizer, world.device)
        self._optimizer = optimizer(self._named)
        fill_state(self._optimizer, (parameter for _, parameter in self._named), self._roles)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepReport:
        """One optimizer step over the micro-batches of all ranks; this data rank's share may be empty.

        Where loss or gradient is not finite, on any rank, nothing is updated on all of them. Raises UserError, on all ranks,
        where the global batch has no trained token.
        """
        sent = self._world.bytes_sent
        counts = count_step(self._world, micro_batches)
        self._model.train(True)
        self._gradients.zero()
        summed = self._run(micro_batches, self._scale.value / counts.trained_tokens)
        self._gradients.reduce()
        loss, scaled_norm = self._agree(float(summed) / counts.trained_tokens, self._gradients.norm())
        verdict = self._scale.judge(loss, scaled_norm, clip=self._settings.gradient_clip)
        if verdict.applied:
            self._gradients.multiply(verdict.factor)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        return StepReport(
            loss=loss,
            gradient_norm=verdict.norm,
            trained_tokens=counts.trained_tokens,
            tokens=counts.tokens,
            applied=verdict.applied,
            bytes_sent=self._world.bytes_sent - sent,
            overflow=verdict.overflow,
        )

    def rehearse(self, micro_batches: Sequence[MicroBatch]) -> bool:
        return False  # ranks meet in the middle of a forward: one that runs out of memory there leaves the others waiting

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(summed loss, trained tokens) over all ranks. Unequal and empty shares are fine; no state changes."""
        self._model.train(False)
        summed = self._run(micro_batches, None)
        (loss_sum,) = self._world.sum([float(summed)])  # only last stages have one
        (counted,) = self._world.sum_shares([sum(batch.num_trained_tokens for batch in micro_batches)])
        return loss_sum, int(counted)

    def shards(self) -> Iterator[Shard]:
        """Parameters and optimizer state that this stage owns; of all tensors in order, this data rank writes its share."""
        stage = self._world.coordinates.pipeline
        owned = [(name, parameter) for name, parameter in self._named if self._holders.owner(name) == stage]
        state = state_of(owned, self._optimizer, self._roles)
        yield from shards_of(state, rank=self._world.data_rank, ranks=self._world.data_ranks)
        if self._world.rank == 0:
            yield from self._scale.shards()

    def load(self, read: ShardReader) -> None:
        """Restore what lies on this rank. Raises KeyError for what the checkpoint lacks."""
        fill(self._state(), read)
        self._scale.load(read)

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every trained parameter of all stages on the CPU, one at a time, in the model's order."""
        mine = dict(self._named)
        for name, shape in self._model.trained_shapes().items():
            (owner,) = ranks_with(self._world.layout, 0, [self._holders.owner(name)])
            tensor = mine[name].detach().cpu().contiguous() if self._world.rank == owner else torch.empty(shape)
            if self._world.rank == owner:
                self._world.bytes_sent += tensor.numel() * tensor.element_size()
            dist.broadcast(tensor, src=owner)
            yield name, tensor

    def fingerprint(self) -> str:
        """blake2b of names, shapes and bits of all trained parameters."""
        return fingerprint_of(self.full_tensors())

    def live(self, run: Callable[[], T]) -> T:
        return run()  # what it runs is a whole model of its own (see `whole.gathered`)

    def held(self) -> Held:
        here = held_by((p for p in self._model.module.parameters() if not p.is_meta), self._optimizer)
        trained = sum(math.prod(shape) for shape in self._model.trained_shapes().values())
        return Held(here.parameter_bytes, here.optimizer_bytes, trained, here.trained_here)

    def replica(self) -> tuple[str, str]:
        """The data ranks of one stage hold the same."""
        tensors = ((f"{name}/{role}", tensor) for name, role, tensor in self._state())
        return f"stage {self._world.coordinates.pipeline}", bits_of(tensors)

    def close(self) -> None:
        self._gradients.detach()
        self._optimizer.state.clear()

    def _run(self, micro_batches: Sequence[MicroBatch], factor: float | None) -> torch.Tensor:
        """The summed loss of this data rank's micro-batches, 0 but on its last stage; with a factor, their gradients too."""
        batches = [batch for batch in micro_batches if batch.num_trained_tokens]
        if batches:
            batches += [_nothing(batches[0].step)] * (self._pipe.padded(len(batches)) - len(batches))
        # Everything is laid out before the first stage computes: what cannot be is then an error of its own.
        laid_out = [self._model.lay_out(batch) for batch in batches]
        sent = self._pipe.bytes_sent
        summed = self._pipe.evaluate(laid_out) if factor is None else self._pipe.train(laid_out, factor)
        self._world.bytes_sent += self._pipe.bytes_sent - sent
        return summed

    def _agree(self, loss: float, norm: float) -> tuple[float, float]:
        """(loss, norm) of the whole step: every rank adds the same numbers in the same order, so that all decide alike."""
        told = [0.0] * (2 * self._world.world_size)
        told[2 * self._world.rank : 2 * self._world.rank + 2] = loss, norm
        told = self._world.sum(told)
        stages = ranks_with(self._world.layout, 0, range(self._world.layout.pipeline))
        return sum(told[::2]), math.hypot(*(told[2 * rank + 1] for rank in stages))

    def _state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        return state_of(self._named, self._optimizer, self._roles)


def _nothing(step: int) -> MicroBatch:
    """A micro-batch without a sequence: it fills a schedule up, and changes neither loss nor gradient."""
    none, bounds = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return MicroBatch(step, -1, (), none, none.astype(bool), bounds, bounds, ())
