"""The engine in which ranks keep one model in pieces: full shard, hybrid shard, and tensor parallel under either.

Full sharding is torch's FSDP2 (`fully_shard`): each block's weights are put together while the block computes. Its forward
is collective, so all ranks run equally many micro-batches: a rank with a smaller share runs a dummy of weight 0. FSDP's own
averaging is off: the loss is divided by the trained tokens of the whole global batch, and gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, final

import numpy as np
import torch
from torch import nn

from fleetune.parallel.bits import bits_of, fingerprint_of
from fleetune.parallel.held import Held, held_by
from fleetune.parallel.loss_scale import LossScale
from fleetune.parallel.native import Forward, StepSettings
from fleetune.parallel.optimizer_state import OptimizerFactory, fill_state, find_roles
from fleetune.parallel.pieces import Piece, Pieces
from fleetune.parallel.step_counts import StepCounts, check_weight, count_step
from fleetune.parallel.world import World
from fleetune.spec.records import MicroBatch, Shard, ShardReader, StepReport

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel
from fleetune.parallel.full_shard import Root

T = TypeVar("T")


@final
class ShardedEngine:
    """One model in pieces over `shard` ranks, in `replicate` copies. See `fleetune.parallel.engine.Engine`."""

    lockstep = True

    def __init__(
        self,
        model: CausalModel,
        forward: Forward,
        *,
        root: Root,
        pieces: Pieces,
        world: World,
        optimizer: OptimizerFactory,
        settings: StepSettings,
    ) -> None:
        self._model, self._forward, self._root, self._world = model, forward, root, world
        self._settings = settings
        self._trained = pieces.trained()
        # The optimizer works on plain pieces: every kind of it does, fused or not, whatever the pieces are part of.
        self._plain = [nn.Parameter(piece.tensor) for piece in self._trained]
        self._scale = LossScale(enabled=settings.precision == "fp16")
        self._roles = find_roles(optimizer, world.device)
        self._optimizer = optimizer([(piece.name, plain) for piece, plain in zip(self._trained, self._plain)])
        fill_state(self._optimizer, self._plain, self._roles)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepReport:
        """One optimizer step; see the protocol. Where loss or gradient is not finite on any rank, no rank updates."""
        sent = self._world.bytes_sent
        counts = count_step(self._world, micro_batches)
        self._model.train(True)
        for piece in self._trained:
            piece.parameter.grad = None
        mine = self._accumulate(micro_batches, counts)
        self._sum_partial_gradients()
        loss, scaled_norm = self._agree(mine)
        verdict = self._scale.judge(loss, scaled_norm, clip=self._settings.gradient_clip)
        if verdict.applied:
            self._update(learning_rate, verdict.factor)
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
        rounds = int(self._world.max([len(micro_batches)])[0])
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self._padded(micro_batches, rounds):
                loss, weight = self._run(batch)
                if batch is not _DUMMY:
                    total += float(loss)
                    count += weight
        self._root.let_go()
        loss_sum, counted = self._world.sum_shares([total, count])
        return loss_sum, int(counted)

    def live(self, run: Callable[[], T]) -> T:
        with torch.no_grad():
            result: T = self._root(run)
        self._root.let_go()
        return result

    def shards(self) -> Iterator[Shard]:
        """This rank's pieces. Of what several ranks hold alike, the copies take turns in writing."""
        for number, (piece, plain) in enumerate(zip(self._trained, self._plain)):
            if piece.tensor.numel() and self._writes(piece, number):
                yield Shard(piece.name, "parameter", piece.global_shape, piece.offset, piece.tensor)
                state = self._optimizer.state[plain]
                for role in self._roles:
                    value = state[role.name].detach()
                    if role.like_parameter:
                        yield Shard(piece.name, role.name, piece.global_shape, piece.offset, value)
                    elif not any(piece.offset):
                        yield Shard(piece.name, role.name, (1,), (0,), value.reshape(1))
        if self._world.rank == 0:
            yield from self._scale.shards()

    def load(self, read: ShardReader) -> None:
        """Restore this rank's pieces from a checkpoint of any layout. Raises KeyError for what it lacks."""
        self._root.let_go()
        with torch.no_grad():
            for piece, plain in zip(self._trained, self._plain):
                shape = tuple(piece.tensor.shape)
                state = self._optimizer.state[plain]
                if piece.tensor.numel():
                    piece.tensor.copy_(read(piece.name, "parameter", piece.offset, shape))
                for role in self._roles:
                    if not role.like_parameter:
                        state[role.name].copy_(read(piece.name, role.name, (0,), (1,)).reshape(()))
                    elif piece.tensor.numel():
                        state[role.name].copy_(read(piece.name, role.name, piece.offset, shape))
        self._scale.load(read)

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every trained parameter, whole, on the CPU, one at a time. All ranks take each."""
        for piece in self._trained:
            yield piece.name, self._whole(piece).cpu()

    def fingerprint(self) -> str:
        """blake2b of names, shapes and bits of all trained parameters; the same in every layout."""
        return fingerprint_of(self.full_tensors())

    def held(self) -> Held:
        held = held_by(self._model.module.parameters(), self._optimizer)
        whole = sum(math.prod(piece.global_shape) for piece in self._trained)
        return Held(held.parameter_bytes, held.optimizer_bytes, whole, held.trained_here)

    def replica(self) -> tuple[str, str]:
        """The same pieces are held along the axis `replicate`."""
        at = self._world.coordinates
        mine = [(f"{piece.name}/parameter", piece.tensor) for piece in self._trained]
        for piece, plain in zip(self._trained, self._plain):
            mine += [(f"{piece.name}/{role.name}", self._optimizer.state[plain][role.name]) for role in self._roles]
        return f"shard {at.shard}, tensor {at.tensor}, pipeline {at.pipeline}", bits_of(mine)

    def close(self) -> None:
        for piece in self._trained:
            piece.parameter.grad = None
        self._optimizer.state.clear()

    def _accumulate(self, micro_batches: Sequence[MicroBatch], counts: StepCounts) -> float:
        """Forward and backward of this rank's share; returns its part of the mean loss."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for number, batch in enumerate(self._padded(micro_batches, counts.rounds)):
            is_last = number == counts.rounds - 1
            self._root.set_is_last_backward(is_last)
            # Copies of the model hear of each other's gradients once a step in any case.
            self._root.set_requires_all_reduce(is_last)
            self._root.set_requires_gradient_sync(is_last or self._settings.accumulate == "shards")
            loss, _ = self._run(batch)
            real = batch is not _DUMMY
            (loss * (self._scale.value / counts.trained_tokens if real else 0.0)).backward()
            if real:
                total += loss.detach()
        return float(total) / counts.trained_tokens

    def _padded(self, micro_batches: Sequence[MicroBatch], rounds: int) -> Iterator[MicroBatch]:
        """As many micro-batches as every rank runs: those without a trained token, and those this rank lacks, as dummies."""
        for number in range(rounds):
            real = number < len(micro_batches) and micro_batches[number].num_trained_tokens > 0
            yield micro_batches[number] if real else _DUMMY

    def _run(self, batch: MicroBatch) -> tuple[torch.Tensor, int]:
        loss, weight = self._root(lambda: self._forward(batch))
        check_weight(batch, weight)
        return loss, weight

    def _sum_partial_gradients(self) -> None:
        """Of parameters that all tensor ranks have, but of whose gradient each finds a part."""
        if self._world.layout.tensor == 1:
            return
        partial = [piece for piece in self._trained if piece.cut.partial]
        gradients = [gradient for piece in partial if (gradient := piece.gradient()) is not None and gradient.numel()]
        if gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._world.sum_over("tensor", flat)
            for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
                gradient.copy_(part.view_as(gradient))

    def _agree(self, mine: float) -> tuple[float, float]:
        """(loss, L2 norm of the whole gradient), the same on every rank: each piece counts once, whoever holds it too."""
        at = self._world.coordinates
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for piece in self._trained:
            gradient = piece.gradient()
            if gradient is not None and at.replicate == 0 and (piece.tensor_sharded or at.tensor == 0):
                squares += torch.linalg.vector_norm(gradient).double() ** 2
        counted = mine if self._world.layout.speaks(self._world.rank) else 0.0
        loss, total = self._world.sum([counted, float(squares)])
        return loss, math.sqrt(total) if math.isfinite(total) else total

    def _update(self, learning_rate: float, factor: float) -> None:
        for piece, plain in zip(self._trained, self._plain):
            gradient = piece.gradient()
            plain.grad = torch.zeros_like(plain) if gradient is None else gradient
            if factor != 1.0:
                plain.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for piece, plain in zip(self._trained, self._plain):
            plain.grad = piece.parameter.grad = None

    def _writes(self, piece: Piece, number: int) -> bool:
        at, layout = self._world.coordinates, self._world.layout
        if not piece.tensor_sharded and at.tensor != number % layout.tensor:
            return False
        return at.replicate == number % layout.replicate

    def _whole(self, piece: Piece) -> torch.Tensor:
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor

        data = piece.parameter.detach()
        whole = data.full_tensor() if isinstance(data, DTensor) else data
        if piece.cut.dim is None:
            return whole
        parts = [torch.empty_like(whole) for _ in range(self._world.layout.tensor)]
        dist.all_gather(parts, whole.contiguous(), group=self._world.mesh.get_group("tensor"))
        return torch.cat(parts, dim=piece.cut.dim)


#: Two tokens that nobody counts: what a rank runs where the others run more.
_DUMMY = MicroBatch(
    step=0,
    number=-1,
    sequences=(0,),
    tokens=np.zeros(2, dtype=np.int64),
    trained=np.array([False, True]),
    document_bounds=np.array([0, 2]),
    sequence_bounds=np.array([0, 1]),
    samples=("",),
)
