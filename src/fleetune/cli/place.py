"""Where a run lives: its folder is chosen, checked, opened, and taken back where a start came to nothing."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleetune.launch.lease import Lease
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder

#: Entries that a start which died early may have left; anything else in a folder without a run is somebody's.
_OURS = re.compile(
    r"logs|checkpoints|outcomes|heartbeat|lease\.json|\.lease.*|plan\.json|deepspeed\.json|quarantine\.jsonl|\..*\.tmp"
)
_KEPT = "quarantine.jsonl"


def default_path(model: str, data: str) -> Path:
    """`runs/<model>-<data>-<time>`, one that is not there."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model}-{Path(data).stem}").strip("-.")[:60]
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number, path = 1, stem
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def check_new(folder: RunFolder) -> None:
    """Refuse a folder that a new run may not use. Raises UserError; touches nothing."""
    path = folder.path
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"run {path} is a file or a link, and a run needs a folder of its own: give another --run")
    if folder.exists():
        raise UserError(f"run {path} is there already: give --resume to go on with it, or another --run for a new one")
    strange = sorted(name for name in os.listdir(path) if not _OURS.fullmatch(name)) if path.is_dir() else []
    if strange:
        raise UserError(f"run {path} holds {strange[0]!r}, which belongs to no run: give a new folder as --run")
    _check_writable(path)


def _check_writable(path: Path) -> None:
    """The nearest folder that exists must let us write; a read-only place is told before anything is prepared."""
    place = next(place for place in (path, *path.parents) if place.exists())
    if not place.is_dir():
        raise UserError(f"run {path} lies in {place}, which is no folder: give another --run")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"run {path} cannot be made, because {place} may not be written to: give another --run")


@dataclass
class Opened:
    """A run folder that is ours while its lease is held. failed: the start came to nothing before anything was trained."""

    lease: Lease
    failed: bool = False


@contextmanager
def opened(folder: RunFolder) -> Iterator[Opened]:
    """The folder, made where it is not there, with its lease. What a start that failed has made new is taken back.

    A run whose preparation has ended is never touched, whatever happens.
    """
    made = [place for place in (folder.path, *folder.path.parents) if not place.exists()]
    was_run = folder.exists()
    try:
        folder.create()
        with Lease.take(folder) as lease:
            if folder.exists() and not was_run:
                raise UserError(
                    f"another run has just begun in {folder.path}: give another --run, or --resume to go on with it"
                )
            place = Opened(lease)
            try:
                yield place
            except (UserError, OSError):
                place.failed = True
                raise
            finally:
                if place.failed and not was_run and not folder.prepared.exists():
                    _clear(folder)
    finally:
        if not was_run:
            _remove_empty(made)


def _clear(folder: RunFolder) -> None:
    """Take back what a start that came to nothing has written; rows that were set aside stay, to be mended."""
    for entry in folder.path.iterdir():
        if entry.name != _KEPT:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _remove_empty(made: list[Path]) -> None:
    """Remove the folders that this start has made and left empty, the innermost first."""
    for place in made:
        try:
            place.rmdir()
        except OSError:
            return  # a run, rows that were set aside, or somebody else
