"""The folder of prepared data: each entry is complete or absent, also when two processes prepare the same at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from fleetune.data.rows_store import MANIFEST
from fleetune.spec.errors import UserError


def cache_folder(given: Path | None) -> Path:
    """Where prepared data lives: `given`, else FLEETUNE_CACHE/data, else the user's cache. Made, and private."""
    if given is not None:
        base = given
    elif os.environ.get("FLEETUNE_CACHE"):
        base = Path(os.environ["FLEETUNE_CACHE"])
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetune"
    folder = base / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def find(folder: Path, name: str) -> Path | None:
    """The complete entry of that name, if there is one."""
    entry = folder / name
    return entry if (entry / MANIFEST).is_file() else None


@contextlib.contextmanager
def building(folder: Path, name: str) -> Iterator[Path | None]:
    """A place to build the entry `name` in, published when the block ends without an error; None where it exists by now.

    One process builds, the others wait for it. What a killed process left half done is removed.
    """
    with _locked(folder, name):
        if find(folder, name):
            yield None
            return
        _sweep(folder, name)
        place = folder / f".{name}.{os.getpid()}.part"
        try:
            place.mkdir(mode=0o700)
            yield place
            _sync(place)
            _publish(place, folder / name)
            _sync(folder)
        except OSError as error:
            raise _unwritable(folder, error) from error
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _sweep(folder: Path, name: str) -> None:
    """Remove what killed processes left: of this entry at once (its lock is ours), of any other after a day."""
    for left in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if left.name.startswith(f".{name}.") or time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)


def _publish(place: Path, entry: Path) -> None:
    if entry.exists() and not (entry / MANIFEST).is_file():
        shutil.rmtree(entry)  # the rest of an entry that somebody deleted in part
    try:
        os.rename(place, entry)
    except OSError as error:
        # Where locks do nothing (some network file systems), another process may have been faster with the same.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Only one process of this machine (or of all, where the file system locks for all) is inside."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        descriptor = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the rename decides
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"no space is left for prepared data in {folder}: free some, or set FLEETUNE_CACHE to a larger place")
    return UserError(
        f"prepared data cannot be written to {folder} ({error.strerror or error}): set FLEETUNE_CACHE to a place you may "
        "write to"
    )
