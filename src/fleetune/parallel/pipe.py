"""The stages of one data rank, one behind the other, run by torch's schedules.

Between stages a micro-batch travels as its tokens one after the other, padded to a fixed number of rows, since torch's
schedules receive into buffers made beforehand; a stage itself computes only the tokens that are there. Every stage reads
the same micro-batches, so each knows positions and bounds of documents without being told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from fleetune.spec.stages import Stage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fleetune.models.layout import LaidOut

#: Schedules that are kept ready; each holds a buffer for every micro-batch.
_KEPT_SCHEDULES = 4


@dataclass(frozen=True)
class Wire:
    """What travels between two stages for each micro-batch: [rows, width] of dtype."""

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """[T, width] -> [rows, width]. Raises RuntimeError for what does not fit."""
        if states.dtype != self.dtype or states.shape[1] != self.width or states.shape[0] > self.rows:
            raise RuntimeError(
                f"hidden states {list(states.shape)} of {states.dtype} do not fit what travels between stages, "
                f"[{self.rows}, {self.width}] of {self.dtype}"
            )
        return nn.functional.pad(states, (0, 0, 0, self.rows - states.shape[0]))


@dataclass(frozen=True)
class StageForwards:
    """What one rank computes. through(run, laid_out, states) -> [T, H]: one of its runs of blocks, by its place among them;
    states: [rows, H] from the stage before, None where it begins with the embedding. loss(laid_out, states) -> (sum, weight):
    the last run of all."""

    through: Callable[[int, LaidOut, torch.Tensor | None], torch.Tensor]
    loss: Callable[[int, LaidOut, torch.Tensor | None], tuple[torch.Tensor, int]]


@final
class Pipe:
    """This rank's stage among `group`. All ranks of the group call the same methods with the same micro-batches."""

    def __init__(
        self,
        stage: Stage,
        forwards: StageForwards,
        *,
        wire: Wire,
        schedule: str,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._stage, self._wire, self._schedule = stage, wire, schedule
        self._group, self._device = group, device
        self._modules = [
            _Run(forwards, place, is_first=number == 0, is_last=number == stage.num_runs - 1, wire=wire)
            for place, number in enumerate(stage.own)
        ]
        self._ready: dict[tuple[int, bool], Any] = {}
        #: Bytes that this rank has sent to its neighbours.
        self.bytes_sent = 0

    def padded(self, count: int) -> int:
        """The number of micro-batches, `count` or more, that the schedule can run in one step."""
        return padded_count(count, self._group.size(), self._schedule)

    def train(self, batches: Sequence[LaidOut], factor: float) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients are those of `factor` times the summed loss.

        Returns the summed loss (float64 scalar on the device; 0 but on the last stage). Give as many as `padded` says.
        """
        return self._run(batches, factor)

    def evaluate(self, batches: Sequence[LaidOut]) -> torch.Tensor:
        """The summed loss of all micro-batches, without gradients."""
        with torch.no_grad():
            return self._run(batches, None)

    def _run(self, batches: Sequence[LaidOut], factor: float | None) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if not batches:
            return total
        schedule = self._schedule_for(len(batches), is_training=factor is not None)
        numbers = torch.arange(len(batches))
        for module in self._modules:
            module.begin(batches, total, factor or 1.0)
        arguments = (numbers,) if self._stage.is_first else ()
        # The last stage's loss has its own targets; what torch calls the target only needs to be there.
        target = numbers if self._stage.is_last and factor is not None else None
        schedule.step(*arguments, target=target, return_outputs=False, number=numbers)
        for module in self._modules:
            module.end()
            sends = (not module.is_last) + (factor is not None and not module.is_first)
            self.bytes_sent += sends * len(batches) * self._wire.num_bytes
        return total

    def _schedule_for(self, count: int, *, is_training: bool) -> Any:
        """Made anew where it is not among the last few: peers keep and drop the same ones at the same time."""
        key = (count, is_training)
        made = self._ready.pop(key, None) or self._make(count, is_training=is_training)
        while len(self._ready) >= _KEPT_SCHEDULES:
            self._ready.pop(next(iter(self._ready)))
        self._ready[key] = made
        return made

    def _make(self, count: int, *, is_training: bool) -> Any:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        stages = [self._torch_stage(number, module) for number, module in zip(self._stage.own, self._modules)]
        # Losses are sums over tokens, divided by the count of the whole step: nothing is left to be scaled.
        options: dict[str, Any] = {"loss_fn": _as_it_is if is_training else None, "scale_grads": False}
        if self._schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, count, **options)
        return (Schedule1F1B if is_training else ScheduleGPipe)(stages[0], count, **options)

    def _torch_stage(self, number: int, module: _Run) -> Any:
        """Shapes are given, so that torch need not find them by sending pickled objects around."""
        from torch.distributed.pipelining import PipelineStage

        between = torch.empty(
            self._wire.rows, self._wire.width, dtype=self._wire.dtype, device=self._device, requires_grad=True
        )
        return PipelineStage(
            module,
            number,
            self._stage.num_runs,
            self._device,
            input_args=torch.zeros(1, dtype=torch.int64) if module.is_first else between,
            output_args=torch.zeros(1, device=self._device, requires_grad=True) if module.is_last else between,
            group=self._group,
        )


class _Run(nn.Module):
    """One run of blocks as torch's schedules call it. It owns no parameters: they are the model's."""

    def __init__(self, forwards: StageForwards, place: int, *, is_first: bool, is_last: bool, wire: Wire) -> None:
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self._forwards, self._place, self._wire = forwards, place, wire
        self.end()

    def begin(self, batches: Sequence[LaidOut], total: torch.Tensor, factor: float) -> None:
        """total: where losses are added up; factor: what they are multiplied by for the backward."""
        self._batches, self._total, self._factor = batches, total, factor

    def end(self) -> None:
        self._batches, self._total, self._factor = (), torch.zeros(()), 1.0

    def forward(self, states: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        """states: [rows, H], or nothing of interest on the first stage. number: int64 [1], of the micro-batch."""
        laid_out = self._batches[int(number)]
        entering = None if self.is_first else states
        if self.is_last:
            loss, weight = self._forwards.loss(self._place, laid_out, entering)
            if weight != laid_out.weight:
                raise RuntimeError(f"the objective gave weight {weight} to {laid_out.weight} trained tokens")
            self._total += loss.detach()
            return (loss * self._factor).reshape(1)
        leaving = self._wire.pad(self._forwards.through(self._place, laid_out, entering))
        # Where nothing in front of here is trained, torch still expects something to hand its gradient to.
        return leaving if leaving.requires_grad or not torch.is_grad_enabled() else leaving.requires_grad_()


def padded_count(count: int, num_ranks: int, schedule: str) -> int:
    """The number of micro-batches, `count` or more, that a schedule of torch's runs in one step.

    1f1b: at least as many as stages. interleaved: as many in each of its rounds, of about as many as ranks.
    """
    count = max(count, num_ranks)
    if schedule == "interleaved":
        while count % (count // num_ranks):
            count += 1
    return count


def _as_it_is(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss
