"""The manifest: what a checkpoint holds, file by file and tensor by tensor, with a digest over all of it.

A folder without a manifest that holds in every point is no checkpoint. Rank 0 writes it last.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetune.checkpoint.pieces import cover_fault
from fleetune.checkpoint.tensor_file import DTYPE_BYTES
from fleetune.spec.records import FORMAT_VERSION
from fleetune.spec.safetensors_header import is_counts, without_duplicates

MANIFEST_NAME = "manifest.json"
#: A longer manifest is refused before it is read.
MAX_MANIFEST_BYTES = 1 << 29

_FILE_NAME = re.compile(r"rank-\d{5}-\d{4}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredFile:
    """One safetensors file: its size and what its bytes hash to (hex)."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredPiece:
    """Where one piece of a tensor lies: the file, its key in that file, and the box of the whole tensor that it fills."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One whole tensor, in pieces. role: `parameter` or a state of the optimizer. dtype: a safetensors name, as `F32`."""

    name: str
    role: str
    global_shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint says of itself. state, fingerprints: JSON objects of the one who saved."""

    step: int
    best: bool
    world_size: int
    files: Mapping[str, StoredFile]
    tensors: tuple[StoredTensor, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    fingerprints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def to_bytes(self) -> bytes:
        """The file's content. Raises ValueError where state or fingerprints are no JSON (a NaN, an object)."""
        value: dict[str, Any] = {
            "version": FORMAT_VERSION,
            "step": self.step,
            "best": self.best,
            "world_size": self.world_size,
            "fingerprints": self.fingerprints,
            "state": self.state,
            **contents_to_json(self.files, self.tensors),
        }
        value = json.loads(json.dumps(value, allow_nan=False))  # as a reader will see it: tuples are lists, keys are text
        value["sha256"] = digest_of(value)
        return (json.dumps(value, ensure_ascii=True, allow_nan=False, indent=0) + "\n").encode("ascii")


def parse_manifest(data: bytes) -> Manifest:
    """The checked manifest in `data`. Raises ValueError that names the field at fault.

    Types, ranges and names are checked one by one: the digest proves that nothing broke, not that nobody forged it.
    """
    value = parse_object(data)
    if value.get("version") != FORMAT_VERSION or type(value.get("version")) is not int:
        raise ValueError(f"format version {str(value.get('version'))[:40]}: this fleetune reads version {FORMAT_VERSION}")
    stated = value.pop("sha256", None)
    if stated != digest_of(value):
        raise ValueError("its own sha256 does not fit its content: a field was changed or damaged")
    _keys(value, "manifest", {"version", "step", "best", "world_size", "fingerprints", "state", "files", "tensors"})
    if not is_counts([value["step"], value["world_size"]]) or value["world_size"] < 1:
        raise ValueError(f"step {value['step']!r} or world_size {value['world_size']!r} is no count")
    if type(value["best"]) is not bool:
        raise ValueError(f"best {value['best']!r} is neither true nor false")
    if not isinstance(value["state"], dict) or not isinstance(value["fingerprints"], dict):
        raise ValueError("state and fingerprints must be objects")
    files, tensors = contents_from_json(value["files"], value["tensors"])
    check_cover(tensors)
    return Manifest(value["step"], value["best"], value["world_size"], files, tensors, value["state"], value["fingerprints"])


def digest_of(value: Mapping[str, Any]) -> str:
    """sha256 (hex) of a JSON value, whatever its spacing and the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def contents_to_json(files: Mapping[str, StoredFile], tensors: Sequence[StoredTensor]) -> dict[str, Any]:
    """Files and tensors as JSON; a rank's part list and the manifest hold them in the same form."""
    return {
        "files": {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in sorted(files.items())},
        "tensors": [
            {
                "name": tensor.name,
                "role": tensor.role,
                "global_shape": list(tensor.global_shape),
                "dtype": tensor.dtype,
                "pieces": [
                    {"file": piece.file, "key": piece.key, "offset": list(piece.offset), "shape": list(piece.shape)}
                    for piece in tensor.pieces
                ],
            }
            for tensor in tensors
        ],
    }


def contents_from_json(files: Any, tensors: Any) -> tuple[dict[str, StoredFile], tuple[StoredTensor, ...]]:
    """The reverse of `contents_to_json`, checked. Raises ValueError."""
    if not isinstance(files, dict) or not isinstance(tensors, list):
        raise ValueError("files must be an object and tensors a list")
    stored = {}
    for name, file in files.items():
        # A plain name of our own making: nothing outside the folder and no other kind of file can be meant.
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"file name {name[:80]!r} is not of the form rank-00000-0000.safetensors")
        _keys(file, f"file {name}", {"bytes", "sha256"})
        if not is_counts([file["bytes"]]) or not isinstance(file["sha256"], str) or not _SHA256.fullmatch(file["sha256"]):
            raise ValueError(f"file {name} has no valid bytes and sha256")
        stored[name] = StoredFile(file["bytes"], file["sha256"])
    found = tuple(_tensor(tensor, stored) for tensor in tensors)
    keys = [(tensor.name, tensor.role) for tensor in found]
    if len(set(keys)) != len(keys):
        raise ValueError("a tensor is listed twice")
    places = [(piece.file, piece.key) for tensor in found for piece in tensor.pieces]
    if len(set(places)) != len(places):
        raise ValueError("two pieces name the same place in a file")
    return stored, found


def check_cover(tensors: Sequence[StoredTensor]) -> None:
    """Every tensor is there whole and once. Raises ValueError that names the first that is not."""
    for tensor in tensors:
        fault = cover_fault(tensor.global_shape, [(piece.offset, piece.shape) for piece in tensor.pieces])
        if fault is not None:
            raise ValueError(f"tensor {tensor.name} ({tensor.role}, shape {list(tensor.global_shape)}): {fault}")


def _tensor(value: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    _keys(value, "a tensor", {"name", "role", "global_shape", "dtype", "pieces"})
    name, role = value["name"], value["role"]
    if not isinstance(name, str) or not isinstance(role, str) or not name or not role:
        raise ValueError("a tensor has no name or role")
    dtype_ok = isinstance(value["dtype"], str) and value["dtype"] in DTYPE_BYTES
    if not is_counts(value["global_shape"]) or not dtype_ok or not isinstance(value["pieces"], list):
        raise ValueError(f"tensor {name[:80]} ({role[:40]}) has no valid global_shape, dtype and pieces")
    return StoredTensor(
        name,
        role,
        tuple(value["global_shape"]),
        value["dtype"],
        tuple(_piece(piece, f"tensor {name[:80]} ({role[:40]})", files) for piece in value["pieces"]),
    )


def _piece(value: Any, where: str, files: Mapping[str, StoredFile]) -> StoredPiece:
    _keys(value, f"a piece of {where}", {"file", "key", "offset", "shape"})
    if not isinstance(value["file"], str) or value["file"] not in files or not isinstance(value["key"], str):
        raise ValueError(f"a piece of {where} names a file {str(value['file'])[:80]!r} that is not listed, or no key")
    if not is_counts(value["offset"]) or not is_counts(value["shape"]):
        raise ValueError(f"a piece of {where} has no valid offset and shape")
    return StoredPiece(value["file"], value["key"], tuple(value["offset"]), tuple(value["shape"]))


def _keys(value: Any, what: str, keys: set[str]) -> None:
    if not isinstance(value, dict) or set(value) != keys:
        found = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{what} must have exactly the keys {sorted(keys)}, not {str(found)[:200]}")


def parse_object(data: bytes) -> dict[str, Any]:
    """A strict JSON object: UTF-8, no key twice, no NaN. Raises ValueError."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=_no_constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"no valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
