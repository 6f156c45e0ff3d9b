"""One rank's part of a checkpoint: its tensors as safetensors files, hashed while written, synced, read back, and listed."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fleetune.checkpoint.disk import CHUNK_BYTES, Disk, WritableFile, open_regular
from fleetune.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    StoredFile,
    StoredPiece,
    StoredTensor,
    contents_from_json,
    contents_to_json,
    parse_object,
)
from fleetune.checkpoint.tensor_file import DTYPE_OF_TORCH, HeaderEntry, header_bytes
from fleetune.spec.records import FORMAT_VERSION, Shard

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

#: Tensors are gathered up to this size and written as one file, a larger one alone; this bounds the memory of a save.
FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class Part:
    """What one rank wrote. tensors: each with only this rank's pieces."""

    files: dict[str, StoredFile]
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class PartFailure:
    """Why one rank wrote nothing. code: an errno, or None; needed_bytes: what its part would have taken."""

    cause: str
    code: int | None
    needed_bytes: int


def write_part(disk: Disk, folder: Path, rank: int, shards: Iterable[Shard], *, file_bytes: int) -> Part | PartFailure:
    """Write all `shards` of this rank into `folder`, then the list of them.

    The tensors must stay as they are until this returns. `shards` is always run to its end, also after a failure: to make
    the next one may be a collective that other ranks wait in. What it raises is passed on; what the disk raises is
    returned, with the files of this part removed again.
    """
    writer = _PartWriter(disk, folder, rank, file_bytes)
    failure: OSError | ValueError | None = None
    needed_bytes = 0
    for shard in shards:
        needed_bytes += shard.tensor.numel() * shard.tensor.element_size()
        if failure is None:
            try:
                writer.add(shard)
            except (OSError, ValueError) as error:
                failure = error
    if failure is None:
        try:
            return writer.finish()
        except (OSError, ValueError) as error:
            failure = error
    writer.discard()
    code = failure.errno if isinstance(failure, OSError) else None
    cause = f"rank {rank} could not write {writer.current}: {failure_text(failure)}"
    return leave_failure(disk, folder, rank, PartFailure(cause, code, needed_bytes))


def leave_failure(disk: Disk, folder: Path, rank: int, failure: PartFailure) -> PartFailure:
    """Leave a note for rank 0. Its name says the error and the size: an empty file can be made on a full disk too."""
    path = folder / f"part-{rank:05d}.failed-{failure.code or 0}-{failure.needed_bytes}"
    try:
        file = disk.create(path)
        try:
            file.write(memoryview(failure.cause.encode()))
        finally:
            file.close()
    except OSError as error:
        _log.warning("rank %d could not leave a whole note of its failed save: %s", rank, error)
    return failure


def read_part(folder: Path, rank: int) -> Part | PartFailure:
    """What rank `rank` left in `folder`; for rank 0, after the barrier. Raises OSError, ValueError."""
    note = next((name for name in sorted(os.listdir(folder)) if name.startswith(f"part-{rank:05d}.failed-")), None)
    if note is not None:
        code, needed_bytes = map(int, note.rsplit("-", 2)[1:])
        cause = (folder / note).read_text(errors="replace") or f"rank {rank} could not write its part"
        return PartFailure(cause, code or None, needed_bytes)
    try:
        with open_regular(folder / part_name(rank)) as file:
            value = parse_object(file.read(MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        return PartFailure(f"rank {rank} left neither its part nor a cause: see its log", None, 0)
    if value.get("version") != FORMAT_VERSION:
        raise ValueError(f"rank {rank} runs another version of fleetune")
    return Part(*contents_from_json(value.get("files"), value.get("tensors")))


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.json"


def write_whole(disk: Disk, path: Path, data: bytes) -> None:
    """Write a small file, sync it, and read it back. Raises OSError."""
    file = disk.create(path)
    try:
        file.write(memoryview(data))
        file.sync()
    finally:
        file.close()
    check_on_disk(disk, path, hashlib.sha256(data).hexdigest())


def check_on_disk(disk: Disk, path: Path, sha256: str) -> None:
    """Read a file back. Raises OSError where the disk holds other bytes than were written."""
    with disk.open(path) as file:
        found = hash_of(file)
    if found != sha256:
        raise OSError(5, "reading it back gave other bytes than were written: the disk is failing", str(path))


def hash_of(file: BinaryIO) -> str:
    """sha256 (hex) of an open binary file from where it stands."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def failure_text(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


@dataclass(frozen=True)
class _Item:
    shard: Shard
    tensor: torch.Tensor
    key: str
    entry: HeaderEntry


class _PartWriter:
    def __init__(self, disk: Disk, folder: Path, rank: int, file_bytes: int) -> None:
        self.current = "its part"
        self._disk, self._folder, self._rank, self._file_bytes = disk, folder, rank, file_bytes
        self._waiting: list[_Item] = []
        self._waiting_bytes = 0
        self._files: dict[str, StoredFile] = {}
        self._created: list[str] = []
        self._tensors: dict[tuple[str, str], StoredTensor] = {}

    def add(self, shard: Shard) -> None:
        item = _item(shard)
        if self._waiting and self._waiting_bytes + item.entry.num_bytes > self._file_bytes:
            self._write_file()
        if item.tensor.numel() or not math.prod(shard.global_shape):  # an empty share of a tensor needs no piece
            self._waiting.append(item)
            self._waiting_bytes += item.entry.num_bytes

    def finish(self) -> Part:
        if self._waiting:
            self._write_file()
        part = Part(self._files, tuple(self._tensors.values()))
        self.current = part_name(self._rank)
        content = {"version": FORMAT_VERSION, **contents_to_json(part.files, part.tensors)}
        # Under its own name only when it is whole and on the disk: for rank 0 the name says that this rank is done.
        unfinished = f"{self.current}.unfinished"
        self._created.append(unfinished)
        write_whole(self._disk, self._folder / unfinished, json.dumps(content).encode())
        self._disk.rename(self._folder / unfinished, self._folder / self.current)
        return part

    def discard(self) -> None:
        """Give the space back, so that the note of the failure finds room."""
        self._waiting.clear()
        for name in self._created:
            try:
                self._disk.remove_file(self._folder / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                _log.warning("%s could not be removed: %s", self._folder / name, error)

    def _write_file(self) -> None:
        name = f"rank-{self._rank:05d}-{len(self._files):04d}.safetensors"
        self.current = name
        self._created.append(name)
        path = self._folder / name
        file = self._disk.create(path)
        try:
            stored = _write_tensors(file, self._waiting)
            file.sync()
        finally:
            file.close()
        check_on_disk(self._disk, path, stored.sha256)
        self._files[name] = stored
        for item in self._waiting:
            self._list(item, name)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _list(self, item: _Item, file: str) -> None:
        shard = item.shard
        piece = StoredPiece(file, item.key, tuple(shard.offset), tuple(shard.tensor.shape))
        known = self._tensors.get((shard.name, shard.role))
        pieces = (piece,) if known is None else (*known.pieces, piece)
        self._tensors[shard.name, shard.role] = StoredTensor(
            shard.name, shard.role, tuple(shard.global_shape), item.entry.dtype, pieces
        )


def _item(shard: Shard) -> _Item:
    dtype = DTYPE_OF_TORCH.get(str(shard.tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"tensor {shard.name} ({shard.role}) has type {shard.tensor.dtype}, which a checkpoint cannot hold")
    key = f"{shard.role}:{shard.name}@{','.join(map(str, shard.offset))}"
    return _Item(shard, shard.tensor.detach().to("cpu").contiguous(), key, HeaderEntry(dtype, tuple(shard.tensor.shape)))


def _write_tensors(file: WritableFile, items: list[_Item]) -> StoredFile:
    import torch

    digest = hashlib.sha256()
    size = 0
    header = memoryview(header_bytes([(item.key, item.entry) for item in items]))
    views = (memoryview(item.tensor.reshape(-1).view(torch.uint8).numpy()) for item in items)
    for view in (header, *views):
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
    return StoredFile(size, digest.hexdigest())
