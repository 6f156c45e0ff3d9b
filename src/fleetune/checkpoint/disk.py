"""The few file operations that saving is made of, behind one contract, so that a test can fail or cut off any of them."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO, Protocol

#: Bytes written, read or hashed at a time: large enough to run at disk speed, small enough to cost no memory.
CHUNK_BYTES = 8 << 20


class WritableFile(Protocol):
    """A new file being written. All methods raise OSError."""

    def write(self, data: memoryview) -> None:
        """Append all of `data` (uint8, contiguous)."""
        ...

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """What saving asks of a file system. Every method raises OSError; none leaves a handle open when it does."""

    def make_folder(self, path: Path) -> None:
        """A new folder for its owner only. Raises FileExistsError."""
        ...

    def create(self, path: Path) -> WritableFile:
        """A new file for its owner only; never follows or replaces what is there."""
        ...

    def open(self, path: Path) -> BinaryIO:
        """A regular file to read back; a symbolic link is refused. What was written and synced comes from the disk."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Move within one folder. `new` must not exist: nothing is ever replaced."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder are on the disk."""
        ...

    def remove_file(self, path: Path) -> None: ...

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        ...

    def free_bytes(self, path: Path) -> int: ...


class RealDisk:
    """The operating system's own file operations."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def create(self, path: Path) -> WritableFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        return _NewFile(os.open(path, flags, 0o600))

    def open(self, path: Path) -> BinaryIO:
        return open_regular(path)

    def rename(self, old: Path, new: Path) -> None:
        # os.rename would silently replace an empty folder or a file.
        if os.path.lexists(new):
            raise FileExistsError(17, "there is already something", str(new))
        os.rename(old, new)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


class _NewFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: memoryview) -> None:
        while data:  # one write may take less than it was given: a full disk, a signal, the 2 GiB limit of Linux
            written = os.write(self._descriptor, data[: 1 << 30])
            data = data[written:]

    def sync(self) -> None:
        full_sync = getattr(fcntl, "F_FULLFSYNC", None)
        if full_sync is None:
            os.fsync(self._descriptor)
        else:  # macOS: fsync alone leaves the data in the drive's own cache
            fcntl.fcntl(self._descriptor, full_sync)
        # Forget the cached pages, so that reading back reads the disk and not the memory the data came from.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A link, pipe or device is an OSError: opening it could hang or lead elsewhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(22, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def remove_tree(disk: Disk, path: Path) -> None:
    """Remove a folder of ours with the files in it; what is already gone is no error. Raises OSError.

    Links are removed, never followed; folders inside are not expected and are left to fail.
    """
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    for name in names:
        disk.remove_file(path / name)
    disk.remove_folder(path)
