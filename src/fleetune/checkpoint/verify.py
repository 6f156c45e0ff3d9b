"""Is this folder a checkpoint, whole and unchanged? Only JSON and safetensors headers are parsed, without torch."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fleetune.checkpoint.disk import open_regular
from fleetune.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, StoredFile, parse_manifest
from fleetune.checkpoint.part import hash_of
from fleetune.checkpoint.tensor_file import HeaderEntry
from fleetune.spec.safetensors_header import parse_header

_FOLDER_NAME = re.compile(r"step-(\d{6,15})(\.old-[0-9a-f]{8})?")


class Damaged(Exception):
    """A checkpoint that must not be used: which of its files, and why."""

    def __init__(self, file: str, cause: str) -> None:
        self.file, self.cause = file, cause
        super().__init__(f"{file}: {cause}")


@dataclass(frozen=True)
class Refusal:
    """A folder that looks like a checkpoint and was not loaded."""

    step: int
    folder: Path
    file: str
    cause: str

    def __str__(self) -> str:
        return f"checkpoint {self.folder} is refused: {self.file}: {self.cause}"


@dataclass(frozen=True)
class Candidate:
    """A folder whose name says that it is a checkpoint. set_aside: an older one of its step that was about to be replaced."""

    step: int
    folder: Path
    set_aside: bool


def candidates(folder: Path) -> list[Candidate]:
    """All folders named like checkpoints, the newest step first, for one step the current before the one set aside."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(match, folder / name) for name in names if (match := _FOLDER_NAME.fullmatch(name))]
    listed = [Candidate(int(match[1]), path, match[2] is not None) for match, path in found]
    return sorted(listed, key=lambda candidate: (-candidate.step, candidate.set_aside))


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def verify(candidate: Candidate, *, hashes: bool = True) -> Manifest:
    """The manifest of a checkpoint that holds in every point. Raises Damaged, naming the file and the cause.

    hashes False: sizes, headers and all of the manifest are checked, the bytes of the tensors are not.
    """
    if not stat.S_ISDIR(os.lstat(candidate.folder).st_mode):
        raise Damaged(candidate.folder.name, "is no folder (a link is not followed)")
    manifest = _read_manifest(candidate.folder)
    if manifest.step != candidate.step:
        raise Damaged(MANIFEST_NAME, f"is of step {manifest.step}, and its folder is named for step {candidate.step}")
    expected = _expected_headers(manifest)
    for name, stored in manifest.files.items():
        try:
            with open_regular(candidate.folder / name) as file:
                _check_file(name, file, stored, expected.get(name, {}), hashes=hashes)
        except FileNotFoundError:
            raise Damaged(name, "is missing") from None
        except OSError as error:
            raise Damaged(name, f"cannot be read: {error.strerror or error}") from None
    return manifest


def signature(folder: Path, names: Iterable[str]) -> tuple[tuple[str, int, int, int], ...]:
    """Tells whether the files of a checkpoint were touched since they were verified. Raises OSError."""
    found = [(name, os.lstat(folder / name)) for name in (MANIFEST_NAME, *names)]
    return tuple((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found)


def _read_manifest(folder: Path) -> Manifest:
    try:
        with open_regular(folder / MANIFEST_NAME) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise Damaged(MANIFEST_NAME, "is missing") from None
    except OSError as error:
        raise Damaged(MANIFEST_NAME, f"cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_MANIFEST_BYTES:
        raise Damaged(MANIFEST_NAME, f"is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        return parse_manifest(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(MANIFEST_NAME, str(error)) from None


def _expected_headers(manifest: Manifest) -> dict[str, dict[str, HeaderEntry]]:
    expected: dict[str, dict[str, HeaderEntry]] = {}
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            expected.setdefault(piece.file, {})[piece.key] = HeaderEntry(tensor.dtype, piece.shape)
    return expected


def _check_file(name: str, file: BinaryIO, stored: StoredFile, expected: dict[str, HeaderEntry], *, hashes: bool) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != stored.num_bytes:
        raise Damaged(name, f"has {size} bytes, the manifest says {stored.num_bytes}")
    try:
        header = {key: HeaderEntry(tensor.dtype, tensor.shape) for key, tensor in parse_header(file, size).items()}
    except ValueError as error:
        raise Damaged(name, str(error)) from None
    for key in sorted(expected.keys() | header.keys()):
        if expected.get(key) != header.get(key):
            raise Damaged(name, f"tensor {key[:120]!r} is not stored as the manifest says")
    if hashes:
        file.seek(0)
        found = hash_of(file)
        if found != stored.sha256:
            raise Damaged(name, f"its sha256 is {found}, the manifest says {stored.sha256}")
