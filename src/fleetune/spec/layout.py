"""How one model is spread over processes: four numbers whose product is their count, and the place of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from fleetune.spec.errors import UserError


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands on each axis of a layout, from 0."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """replicate: copies of the model (and, times shard, shares of every step). shard: ranks that keep one copy in pieces and
    put a block together while it computes. tensor: ranks that compute each layer together. pipeline: runs of blocks, one behind
    the other.

    Ranks are counted with tensor innermost, then shard, replicate and pipeline: the axes that talk most are the nearest ranks.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        return prod(self.sizes().values())

    @property
    def data_ranks(self) -> int:
        """Into how many shares a step is divided."""
        return self.replicate * self.shard

    def sizes(self) -> dict[str, int]:
        """Size of each axis by name, outermost first."""
        return {"pipeline": self.pipeline, "replicate": self.replicate, "shard": self.shard, "tensor": self.tensor}

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank that is not in the layout."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} of {self.describe()}")
        found = {}
        for axis, size in reversed(self.sizes().items()):
            rank, found[axis] = divmod(rank, size)
        return Coordinates(**found)

    def data_rank(self, rank: int) -> int:
        """Which share of every step is this rank's; its tensor and pipeline peers have the same."""
        at = self.coordinates(rank)
        return at.replicate * self.shard + at.shard

    def speaks(self, rank: int) -> bool:
        """Whether this rank is the first of those with its share: where counts are summed, only it is counted."""
        at = self.coordinates(rank)
        return at.tensor == 0 and at.pipeline == 0

    def describe(self) -> str:
        """`replicate 2 × shard 4`; `1 process` where nothing is spread."""
        return " × ".join(f"{axis} {size}" for axis, size in self.to_json().items() if size > 1) or "1 process"

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def derive_layout(asked: Mapping[str, int | None], num_processes: int) -> Layout:
    """The layout of `num_processes`, from what was asked of each axis (None: nothing).

    What is left open is 1, but for `replicate`, which takes the processes that the others leave. Raises UserError where the
    numbers do not multiply to the number of processes.
    """
    given = {axis: size for axis, size in asked.items() if size is not None}
    taken = prod(given.values())
    said = " × ".join(f"{axis} {size}" for axis, size in given.items())
    there = "there is 1 process" if num_processes == 1 else f"there are {num_processes} processes"
    if "replicate" in given:
        if taken != num_processes:
            raise UserError(
                f"{said} needs {taken} process{'es' if taken > 1 else ''}, and {there}: give --gpus {taken}, or leave out "
                "--replicate"
            )
        return Layout(**given)
    if num_processes % taken:
        at_least = -(-num_processes // taken) * taken
        raise UserError(
            f"{said} needs a multiple of {taken} processes, and {there}: give --gpus {at_least}, or a "
            f"{' and '.join(f'--{axis}' for axis in given)} that divides {num_processes}"
        )
    return Layout(**given, replicate=num_processes // taken)
