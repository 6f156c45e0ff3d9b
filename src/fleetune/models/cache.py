"""Where fleetune keeps what it made once and needs again (converted weights, hashes, what a device can do), and hashes.

No torch. The folder is `FLEETUNE_CACHE`, else `fleetune` in the user's cache folder; everything in it can be deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import read_json, write_json

#: A file that changed more recently than this may change again without its time showing it: its hash is not remembered.
_SETTLED_S = 2.0
_BLOCK_BYTES = 8 << 20


def cache_folder(*names: str) -> Path:
    """A folder of the cache, made private to its owner. Raises UserError where it cannot be made."""
    given = os.environ.get("FLEETUNE_CACHE")
    if given:
        root = Path(given).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetune"
    folder = root.joinpath(*names)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for path in [*reversed([p for p in folder.parents if p == root or root in p.parents]), folder]:
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the cache folder {folder} cannot be made ({error.strerror}): set FLEETUNE_CACHE to a folder you can write to"
        ) from error
    return folder


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` against every other process of this machine; wait for whoever has it. Dies with us."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remember(kind: str, key: str, value: dict[str, Any]) -> None:
    """Keep a small JSON value in the cache. A cache that cannot be written is no error: the value is found again."""
    with contextlib.suppress(OSError, UserError):
        write_json(cache_folder(kind) / f"{_digest(key)}.json", {"key": key, **value})


def recall(kind: str, key: str) -> dict[str, Any] | None:
    """What `remember` kept under this key, or None."""
    with contextlib.suppress(OSError, UserError, ValueError):
        value = read_json(cache_folder(kind) / f"{_digest(key)}.json")
        if value.get("key") == key:
            return value
    return None


def content_hash(files: Iterable[tuple[str, Path]], *, hub_cache: bool = False) -> str:
    """SHA-256 over names and contents, in the order of the names. hub_cache: the files lie in the hub's local cache."""
    digest = hashlib.sha256()
    for name, path in sorted(files):
        digest.update(json.dumps([name, file_sha256(path, hub_cache=hub_cache)]).encode())
    return digest.hexdigest()


def file_sha256(path: Path, *, hub_cache: bool = False) -> str:
    """SHA-256 of a file. Read in full once; afterwards known by its place, size, time and inode.

    hub_cache: the file lies in the hub's local cache, where a large file is a link to a blob that is named by the SHA-256
    with which its download was checked. (Elsewhere such a link proves nothing.)
    """
    real = path.resolve()
    if hub_cache and real.parent.name == "blobs" and _is_sha256(real.name):
        return real.name
    before = real.stat()
    mark = {"size": before.st_size, "mtime_ns": before.st_mtime_ns, "inode": before.st_ino}
    known = recall("hashes", str(real))
    if known is not None and all(known.get(name) == value for name, value in mark.items()):
        return str(known["sha256"])
    digest = hashlib.sha256()
    with open(real, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    settled = time.time() - before.st_mtime_ns / 1e9 > _SETTLED_S
    if settled and real.stat().st_mtime_ns == before.st_mtime_ns:
        remember("hashes", str(real), {**mark, "sha256": digest.hexdigest()})
    return digest.hexdigest()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _is_sha256(name: str) -> bool:
    return len(name) == 64 and all(character in "0123456789abcdef" for character in name)
