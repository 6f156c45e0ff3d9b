"""Disks that fail, and disks that remember: wrappers of the real one, and a model of what a power cut leaves of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fleetune.checkpoint.disk import RealDisk, WritableFile


@dataclass(frozen=True)
class Operation:
    """One thing done to the disk. other: the new name of a rename; data: what was written."""

    kind: str
    path: Path
    other: Path | None = None
    data: bytes = b""


class WatchedDisk:
    """The real disk; `before` is called with every operation and may raise in its place. All operations are kept."""

    def __init__(self, before: Callable[[Operation], None] = lambda operation: None) -> None:
        self.operations: list[Operation] = []
        self._before = before
        self._real = RealDisk()
        self._lock = threading.Lock()

    def do(self, operation: Operation, action: Callable[[], Any]) -> Any:
        with self._lock:
            self._before(operation)
            result = action()
            self.operations.append(operation)
            return result

    def make_folder(self, path: Path) -> None:
        self.do(Operation("make_folder", path), lambda: self._real.make_folder(path))

    def create(self, path: Path) -> WritableFile:
        return WatchedFile(self, path, self.do(Operation("create", path), lambda: self._real.create(path)))

    def open(self, path: Path) -> BinaryIO:
        self._before(Operation("open", path))
        return self._real.open(path)

    def rename(self, old: Path, new: Path) -> None:
        self.do(Operation("rename", old, new), lambda: self._real.rename(old, new))

    def sync_folder(self, path: Path) -> None:
        self.do(Operation("sync_folder", path), lambda: self._real.sync_folder(path))

    def remove_file(self, path: Path) -> None:
        self.do(Operation("remove_file", path), lambda: self._real.remove_file(path))

    def remove_folder(self, path: Path) -> None:
        self.do(Operation("remove_folder", path), lambda: self._real.remove_folder(path))

    def free_bytes(self, path: Path) -> int:
        return self._real.free_bytes(path)


class WatchedFile:
    def __init__(self, disk: WatchedDisk, path: Path, real: WritableFile) -> None:
        self._disk, self._path, self._real = disk, path, real

    def write(self, data: memoryview) -> None:
        self._disk.do(Operation("write", self._path, None, bytes(data)), lambda: self._real.write(data))

    def sync(self) -> None:
        self._disk.do(Operation("sync", self._path), self._real.sync)

    def close(self) -> None:
        self._real.close()


@dataclass(eq=False)
class File:
    """A file as the system sees it, and as much of it as is surely on the disk."""

    content: bytes = b""
    is_synced: bool = True

    def after_crash(self) -> list[bytes]:
        """What a power cut may leave: the old, the new, a part, or zeros where the data never came."""
        if self.is_synced:
            return [self.content]
        half = len(self.content) // 2
        return [self.content, b"", self.content[:half], bytes(len(self.content))]


@dataclass(eq=False)
class Folder:
    """A folder as the system sees it, and the states of its names since they were last brought to the disk."""

    names: dict[str, Any] = field(default_factory=dict)
    since_sync: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.since_sync = self.since_sync or [dict(self.names)]

    def change(self, **names: Any) -> None:
        for name, node in names.items():
            if node is None:
                del self.names[name]
            else:
                self.names[name] = node
        self.since_sync.append(dict(self.names))

    def sync(self) -> None:
        self.since_sync = [dict(self.names)]


class DiskModel:
    """A file system that keeps only what was synced, and any part of the rest.

    Names of one folder reach the disk in order but at any time until the folder is synced, other folders' names independently
    of them; unsynced content arrives whole, in part, as zeros, or not at all.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.tree = _read(root)

    def apply(self, operation: Operation) -> None:
        folder, name = self._find(operation.path)
        if operation.kind == "make_folder":
            folder.change(**{name: Folder()})
        elif operation.kind == "create":
            folder.change(**{name: File(is_synced=False)})
        elif operation.kind == "write":
            folder.names[name].content += operation.data
            folder.names[name].is_synced = False
        elif operation.kind == "sync":
            folder.names[name].is_synced = True
        elif operation.kind == "rename":
            assert operation.other is not None
            assert operation.other.parent == operation.path.parent
            folder.change(**{operation.other.name: folder.names[name], name: None})
        elif operation.kind == "sync_folder":
            (self.tree if operation.path == self._root else folder.names[name]).sync()
        elif operation.kind in ("remove_file", "remove_folder"):
            folder.change(**{name: None})
        else:
            raise AssertionError(operation.kind)

    def crash_states(self) -> Iterator[dict[str, Any]]:
        """Every tree (folder -> dict, file -> bytes) that a power cut may leave now."""
        yield from _states(self.tree)

    def _find(self, path: Path) -> tuple[Folder, str]:
        folder = self.tree
        parts = path.relative_to(self._root).parts
        for part in parts[:-1]:
            folder = folder.names[part]
        return folder, parts[-1] if parts else ""


def materialise(tree: dict[str, Any], path: Path) -> None:
    """Write a tree of `crash_states` as real files."""
    path.mkdir()
    for name, node in tree.items():
        if isinstance(node, dict):
            materialise(node, path / name)
        else:
            (path / name).write_bytes(node)


def _read(path: Path) -> Folder:
    return Folder({entry.name: _read(entry) if entry.is_dir() else File(entry.read_bytes()) for entry in path.iterdir()})


def _states(folder: Folder) -> Iterator[dict[str, Any]]:
    seen = []
    for names in folder.since_sync:
        choices = []
        for node in names.values():
            choices.append(list(_states(node)) if isinstance(node, Folder) else node.after_crash())
        for contents in itertools.product(*choices):
            state = dict(zip(names, contents))
            if state not in seen:
                seen.append(state)
                yield state
