"""A checkpoint on its way: a folder aside that rank 0 opens, all ranks write into, and rank 0 publishes or removes."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleetune.checkpoint.disk import Disk, remove_tree
from fleetune.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredFile, StoredPiece, StoredTensor, check_cover
from fleetune.checkpoint.part import Part, PartFailure, part_name, read_part, write_whole
from fleetune.checkpoint.verify import folder_name

_log = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"step-\d{6,15}\.tmp-[a-z0-9]+")
#: In place of a token: the checkpoint is there already, and nothing is to be written.
UNCHANGED = "unchanged"


class NotSaved(Exception):
    """A save that was given up; the text is for a person. code: an errno, or None. needed_bytes: over all ranks."""

    def __init__(self, cause: str, *, code: int | None = None, needed_bytes: int = 0) -> None:
        self.code, self.needed_bytes = code, needed_bytes
        super().__init__(cause)


@dataclass(frozen=True)
class Draft:
    """The folder that becomes the checkpoint of `step`."""

    folder: Path
    step: int

    @property
    def unchanged(self) -> bool:
        return self.folder.name.endswith(f".tmp-{UNCHANGED}")

    @property
    def final(self) -> Path:
        return self.folder.with_name(folder_name(self.step))


def open_draft(disk: Disk, store: Path, step: int, *, unchanged: bool) -> Draft:
    """Make the folder aside. Rank 0 only, before the first barrier. Raises OSError."""
    token = UNCHANGED if unchanged else secrets.token_hex(4)
    draft = Draft(store / f"{folder_name(step)}.tmp-{token}", step)
    disk.make_folder(draft.folder)
    return draft


def find_draft(store: Path, step: int) -> Draft | None:
    """The folder that rank 0 has made; for the other ranks, after the first barrier."""
    prefix = f"{folder_name(step)}.tmp-"
    names = [name for name in os.listdir(store) if name.startswith(prefix)] if store.is_dir() else []
    return Draft(store / names[0], step) if len(names) == 1 else None


def remove_leftovers(disk: Disk, store: Path, step: int) -> None:
    """Remove what interrupted saves and deletions have left. Rank 0 only: it owns the folder.

    Raises OSError only where something of `step` itself is left: the other ranks could take it for the new draft.
    """
    for name in sorted(os.listdir(store)):
        if not _LEFTOVER.fullmatch(name):
            continue
        try:
            remove_tree(disk, store / name)
        except OSError as error:
            if name.startswith(f"{folder_name(step)}."):
                raise
            _log.warning("%s, left by an interrupted save, could not be removed: %s", store / name, error)


def gather(draft: Draft, own: Part | PartFailure, world_size: int) -> tuple[dict[str, StoredFile], tuple[StoredTensor, ...]]:
    """The parts of all ranks, rank 0's `own` among them, joined and checked to cover every tensor exactly once.

    Raises NotSaved, OSError, ValueError.
    """
    parts: list[Part] = []
    failures: list[PartFailure] = []
    for rank in range(world_size):
        part = read_part(draft.folder, rank) if rank else own
        if isinstance(part, Part):
            parts.append(part)
        else:
            failures.append(part)
    if failures:
        written = sum(file.num_bytes for part in parts for file in part.files.values())
        code = next((failure.code for failure in failures if failure.code is not None), None)
        needed = written + sum(failure.needed_bytes for failure in failures)
        raise NotSaved("; ".join(failure.cause for failure in failures), code=code, needed_bytes=needed)
    files = {name: file for part in parts for name, file in part.files.items()}
    tensors = _join(parts)
    check_cover(tensors)
    return files, tensors


def publish(disk: Disk, draft: Draft, manifest: Manifest) -> bool:
    """Write the manifest and give the folder its name: the moment at which the checkpoint exists. Rank 0 only.

    An older checkpoint of the same step steps aside under a name that readers still accept, so that at every moment one of
    the two is found. Raises OSError; then nothing has changed for a reader. Returns whether the new name is surely on the
    disk; until it is, nothing older may go.
    """
    write_whole(disk, draft.folder / MANIFEST_NAME, manifest.to_bytes())
    for rank in range(manifest.world_size):
        disk.remove_file(draft.folder / part_name(rank))
    disk.sync_folder(draft.folder)
    aside = draft.final.with_name(f"{draft.final.name}.old-{secrets.token_hex(4)}")
    replaces = os.path.lexists(draft.final)
    if replaces:
        disk.rename(draft.final, aside)
    try:
        disk.rename(draft.folder, draft.final)
        is_durable = _sync_or_undo(disk, draft)
    except OSError:
        if replaces:
            disk.rename(aside, draft.final)
        raise
    if replaces and is_durable:
        _remove_aside(disk, aside)
    return is_durable


def _sync_or_undo(disk: Disk, draft: Draft) -> bool:
    """Bring the new name to the disk, or take it back and raise OSError; False where neither can be done."""
    try:
        disk.sync_folder(draft.final.parent)
        return True
    except OSError as error:
        try:
            disk.rename(draft.final, draft.folder)
        except OSError:
            _log.warning("%s is complete, but may be lost in a power cut: %s", draft.final, error)
            return False
        raise


def remove_checkpoint(disk: Disk, folder: Path) -> None:
    """Remove a checkpoint: first its name, then its files, so that no half of it is ever seen. Raises OSError."""
    doomed = folder.with_name(f"{folder.name.partition('.')[0]}.tmp-{secrets.token_hex(4)}")
    disk.rename(folder, doomed)
    disk.sync_folder(folder.parent)
    remove_tree(disk, doomed)


def same_content(manifest: Manifest, state: Mapping[str, Any], fingerprints: Mapping[str, Any], *, best: bool) -> bool:
    """Whether a checkpoint of the same step would be saved again as it is."""
    return manifest.best == best and manifest.state == state and manifest.fingerprints == fingerprints


def _remove_aside(disk: Disk, aside: Path) -> None:
    try:
        remove_checkpoint(disk, aside)
    except OSError as error:
        _log.warning("the replaced checkpoint %s could not be removed: %s", aside, error)


def _join(parts: list[Part]) -> tuple[StoredTensor, ...]:
    first: dict[tuple[str, str], StoredTensor] = {}
    pieces: dict[tuple[str, str], list[StoredPiece]] = {}
    for part in parts:
        for tensor in part.tensors:
            key = (tensor.name, tensor.role)
            known = first.setdefault(key, tensor)
            pieces.setdefault(key, []).extend(tensor.pieces)
            if (known.global_shape, known.dtype) != (tensor.global_shape, tensor.dtype):
                raise ValueError(
                    f"tensor {tensor.name} ({tensor.role}) is {known.dtype} {list(known.global_shape)} on one rank and "
                    f"{tensor.dtype} {list(tensor.global_shape)} on another"
                )
    return tuple(replace(tensor, pieces=tuple(pieces[key])) for key, tensor in first.items())
