"""Tokenised rows on disk: every token of every row once, written as a stream, independent of sequence length and seed."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from fleetune.spec.run_folder import read_json, write_json

TOKEN = np.dtype("<i4")
TRAINED = np.dtype("u1")
#: One rendered part of a row. A row has one part (`part` -1), or one for each assistant turn where its template rewrites
#: history. ordinal: number of the row among all usable ones, in reading order; number: its row in the original file.
PART = np.dtype(
    [
        ("offset", "<i8"),
        ("length", "<i4"),
        ("trained", "<i4"),
        ("ordinal", "<i8"),
        ("number", "<i8"),
        ("file", "<i4"),
        ("part", "<i4"),
    ]
)
MANIFEST = "manifest.json"
#: Rows that were set aside, one JSON object a line.
BAD_ROWS = "bad_rows.jsonl"


def map_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """Memory-map a flat array; an empty file is an empty array (which cannot be mapped)."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


class HashedFile:
    """A binary file that is hashed while it is written, and fsynced when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open(path, "xb", buffering=1 << 20)  # noqa: SIM115
        self._hash = hashlib.blake2b(digest_size=16)

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).tobytes()
        self._hash.update(data)
        self._file.write(data)

    def close(self) -> str:
        """Make the file durable; returns the hash of its content."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        self._file.close()


class RowWriter:
    """Writes a folder of tokenised rows. `finish` makes it whole; a folder without a manifest is not one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens = HashedFile(folder / "tokens.bin")
        self._trained = HashedFile(folder / "trained.bin")
        self._parts = HashedFile(folder / "parts.bin")
        self.num_tokens = 0
        self.num_rows = 0
        self.num_parts = 0

    def add_row(self, parts: list[tuple[np.ndarray, np.ndarray]], *, file: int, number: int) -> None:
        """One usable row. parts: its (tokens int [L], trained bool [L]), each with a trained token."""
        table = np.zeros(len(parts), dtype=PART)
        for index, (tokens, trained) in enumerate(parts):
            part = index if len(parts) > 1 else -1
            table[index] = (self.num_tokens, len(tokens), int(trained.sum()), self.num_rows, number, file, part)
            self._tokens.write(np.asarray(tokens, dtype=TOKEN))
            self._trained.write(np.asarray(trained, dtype=TRAINED))
            self.num_tokens += len(tokens)
        self._parts.write(table)
        self.num_rows += 1
        self.num_parts += len(parts)

    def finish(self, manifest: dict[str, Any]) -> None:
        hashes = [file.close() for file in (self._tokens, self._trained, self._parts)]
        fingerprint = hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()
        counts = {"num_rows": self.num_rows, "num_parts": self.num_parts, "num_tokens": self.num_tokens}
        write_json(self.folder / MANIFEST, {**manifest, **counts, "fingerprint": fingerprint})

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._tokens, self._trained, self._parts):
            file.abandon()


@dataclass(frozen=True)
class TokenizedRows:
    """A folder of tokenised rows, memory-mapped.

    tokens: int32 [T]; trained: uint8 [T]; parts: `PART` [P], in reading order; manifest: files, counts, report.
    """

    folder: Path
    tokens: np.ndarray
    trained: np.ndarray
    parts: np.ndarray
    manifest: dict[str, Any]

    @staticmethod
    def open(folder: Path) -> TokenizedRows:
        """Raises OSError or ValueError where the folder is not whole."""
        manifest = read_json(folder / MANIFEST)
        sizes = {
            "tokens.bin": manifest["num_tokens"] * TOKEN.itemsize,
            "trained.bin": manifest["num_tokens"] * TRAINED.itemsize,
            "parts.bin": manifest["num_parts"] * PART.itemsize,
        }
        check_sizes(folder, sizes)
        return TokenizedRows(
            folder,
            map_array(folder / "tokens.bin", TOKEN),
            map_array(folder / "trained.bin", TRAINED),
            map_array(folder / "parts.bin", PART),
            manifest,
        )

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["fingerprint"])

    @property
    def num_rows(self) -> int:
        return int(self.manifest["num_rows"])


def check_sizes(folder: Path, sizes: dict[str, int]) -> None:
    """Raises ValueError where a file is longer or shorter than its manifest says, OSError where it is missing."""
    for name, size in sizes.items():
        found = (folder / name).stat().st_size
        if found != size:
            raise ValueError(f"{folder / name} has {found} bytes and its manifest says {size}: delete {folder} and start again")
