"""Checkpoints of a run whose machines do not share its folder: they lie on node 0, and others get copies of what they load.

Saving: ranks of other nodes hand their pieces to rank 0 over the network, one at a time, and rank 0 writes them beside its
own. Loading: the files of the checkpoint that rank 0 chose are copied to each other node, once, and read there. So any layout
that trains over such machines also saves and resumes. The price is said by `SaveReport.seconds`.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch

from fleetune.checkpoint.checkpoint import Checkpoint
from fleetune.checkpoint.manifest import MANIFEST_NAME
from fleetune.checkpoint.store import CheckpointStore, SaveReport
from fleetune.checkpoint.verify import Refusal, folder_name
from fleetune.parallel.carry import barrier_aside, barrier_of, broadcast_bytes, receive, send
from fleetune.parallel.world import World
from fleetune.spec.records import Shard

#: A checkpoint is copied in pieces of this size.
_PIECE_BYTES = 16 << 20


def open_checkpoints(
    folder: Path, world: World, *, keep: int, fingerprints: Mapping[str, Any]
) -> CheckpointStore | SpreadCheckpoints:
    """The checkpoints in `folder` as all ranks see them. All ranks. Whether the machines share the folder is found out."""
    common: dict[str, Any] = {"keep": keep, "fingerprints": fingerprints}
    if world.place.num_nodes == 1 or is_shared(folder, world):
        return CheckpointStore(folder, rank=world.rank, world_size=world.world_size, barrier=barrier_aside(world), **common)
    at_home = sum(node == 0 for node in world.gather_json(world.node))
    barrier = barrier_of(at_home)
    if world.node == 0:
        store = CheckpointStore(folder, rank=world.rank, world_size=at_home, barrier=barrier, **common)
    else:
        store = CheckpointStore(folder, **common)
    return SpreadCheckpoints(store, world, at_home)


def is_shared(folder: Path, world: World) -> bool:
    """Whether every rank sees the folder of rank 0. All ranks."""
    marker = folder / world.broadcast_json(f".seen-{secrets.token_hex(8)}")
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        marker.touch(mode=0o600)
    world.barrier()
    seen = all(world.gather_json(marker.exists()))
    if world.rank == 0:
        marker.unlink(missing_ok=True)
    return seen


@final
class SpreadCheckpoints:
    """As `CheckpointStore`, and every method is collective. at_home: how many ranks, the first ones, run on node 0."""

    def __init__(self, store: CheckpointStore, world: World, at_home: int) -> None:
        self._store, self._world, self._at_home = store, world, at_home
        nodes = world.gather_json(world.node)
        #: The first rank of every other node copies for its node.
        self._copies = world.node != 0 and nodes.index(world.node) == world.rank

    @property
    def folder(self) -> Path:
        return self._store.folder

    @property
    def refused(self) -> list[Refusal]:
        return self._store.refused

    def save(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any], *, best: bool = False) -> SaveReport:
        """Save on node 0. Raises what `shards` raises, and RuntimeError where a machine is lost meanwhile."""
        report: SaveReport | None = None
        pieces = list(shards)  # all at once: making the next one may be a collective, in which others would wait
        if self._world.node == 0:
            offered = self._with_foreign(pieces) if self._world.rank == 0 else iter(pieces)
            report = self._store.save(step, offered, state, best=best)
            for _ in offered:
                pass  # what was not asked for must be taken all the same: somebody sends it
        else:
            self._hand_over(pieces)
        return SaveReport(**self._world.broadcast_json(asdict(report) if report is not None else None))

    def latest(self) -> Checkpoint | None:
        return self._chosen(self._store.latest)

    def at(self, step: int) -> Checkpoint | None:
        return self._chosen(lambda: self._store.at(step))

    def all_steps(self) -> list[int]:
        return self._world.broadcast_json(self._store.all_steps() if self._world.rank == 0 else None)

    def mismatches(self, checkpoint: Checkpoint) -> list[str]:
        return self._store.mismatches(checkpoint)

    def _chosen(self, choose: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """Rank 0's choice, with its files on every node."""
        mine = choose() if self._world.rank == 0 else None
        step = self._world.broadcast_json(mine.step if mine is not None else None)
        if step is None:
            return None
        digest = self._world.broadcast_json(_digest(mine.folder) if mine is not None else None)
        here = mine if mine is not None else self._store.at(step)
        if self._world.any(here is None or _digest(here.folder) != digest):
            files = self._world.broadcast_json(_files_of(mine.folder) if mine is not None else None)
            self._copy(mine.folder if mine is not None else None, step, files)
            here = mine if mine is not None else self._store.at(step)
        if here is None:
            raise RuntimeError(f"the copy of checkpoint {step} in {self.folder} does not hold: {self._store.refused}")
        return here

    def _copy(self, source: Path | None, step: int, files: Mapping[str, int]) -> None:
        """Bring the files of a checkpoint to every node but the first. source: where they lie, on rank 0."""
        draft = self.folder / f"{folder_name(step)}.tmp-copy"
        if self._copies:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True, mode=0o700)
        for name, size in files.items():
            self._copy_file(source / name if source is not None else None, draft / name, size)
        if self._copies:
            for old in self.folder.glob("step-*"):
                if old != draft:
                    shutil.rmtree(old)
            draft.rename(self.folder / folder_name(step))
        self._world.barrier()

    def _copy_file(self, source: Path | None, target: Path, size: int) -> None:
        with ExitStack() as stack:
            reader = stack.enter_context(open(source, "rb")) if source is not None else None
            writer = stack.enter_context(open(target, "xb")) if self._copies else None
            for start in range(0, size, _PIECE_BYTES):
                length = min(_PIECE_BYTES, size - start)
                data = torch.empty(length, dtype=torch.uint8)
                if reader is not None and reader.readinto(data.numpy().data) != length:
                    raise RuntimeError(f"{source} became shorter while it was copied")
                broadcast_bytes(self._world, data)
                if writer is not None:
                    writer.write(data.numpy().data)

    def _with_foreign(self, own: list[Shard]) -> Iterator[Shard]:
        """Rank 0: its own pieces, then those of every rank of the other nodes, one at a time."""
        yield from own
        for rank in range(self._at_home, self._world.world_size):
            count, _ = receive(rank)
            for _ in range(count["shards"]):
                header, data = receive(rank)
                tensor = data.view(getattr(torch, header["dtype"])).reshape(header["shape"])
                yield Shard(header["name"], header["role"], tuple(header["global_shape"]), tuple(header["offset"]), tensor)

    def _hand_over(self, pieces: list[Shard]) -> None:
        send(self._world, {"shards": len(pieces)}, None, 0)
        for piece in pieces:
            header = {
                "name": piece.name,
                "role": piece.role,
                "global_shape": piece.global_shape,
                "offset": piece.offset,
                "shape": tuple(piece.tensor.shape),
                "dtype": str(piece.tensor.dtype).removeprefix("torch."),
            }
            send(self._world, header, piece.tensor, 0)


def _digest(folder: Path) -> str:
    """Of the manifest, which holds the hashes of all other files."""
    return hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest()


def _files_of(folder: Path) -> dict[str, int]:
    """The files of a checkpoint with their sizes; the manifest last, so that a torn copy has none."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return {**{name: size for name, size in sizes.items() if name != MANIFEST_NAME}, MANIFEST_NAME: sizes[MANIFEST_NAME]}
