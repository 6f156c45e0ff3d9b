"""What every engine can do. The loop knows this and nothing of how the model is spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from fleetune.parallel.held import Held
from fleetune.spec.records import MicroBatch, Shard, ShardReader, StepReport

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Engine(Protocol):
    """A model over all ranks, with its optimizer. All methods are collective: every rank calls them in the same order."""

    @property
    def lockstep(self) -> bool:
        """Whether a forward is collective, so that in `live` all ranks must make equally many."""

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepReport:
        """One optimizer step over the micro-batches of all ranks; each gives its own share, which may be empty."""

    def rehearse(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Forward and backward of these, as in `step`, and no trace of it. Raises OutOfMemory on all ranks where the memory of
        any does not hold them. False, and nothing was run, where a failure in the middle could not be undone."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(summed loss, trained tokens) over all ranks, without any change of state; shares may be unequal or empty."""

    def shards(self) -> Iterator[Shard]:
        """This rank's part of the training state. All ranks together give every piece exactly once."""

    def load(self, read: ShardReader) -> None:
        """Restore everything that `shards` gives, from a checkpoint of any layout. Raises KeyError where one is missing."""

    def full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every trained parameter, whole, on the CPU, one at a time, in the same order on all ranks."""

    def fingerprint(self) -> str:
        """A hash of all trained parameters: equal where they are equal to the last bit."""

    def live(self, run: Callable[[], T]) -> T:
        """Call something that runs the model as a module (generation), with what this rank needs for it in place. All ranks;
        without a gradient."""

    def held(self) -> Held:
        """What this rank holds of the training state. No collective takes place."""

    def replica(self) -> tuple[str, str]:
        """(what this rank holds a copy of, a hash of its bits: parameters and optimizer). No collective takes place.

        Ranks whose first value is equal must have an equal second one.
        """

    def close(self) -> None:
        """Let go of memory. No collective takes place."""
