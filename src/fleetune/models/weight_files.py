"""The safetensors files of a model folder, their headers read as bytes. No torch, no safetensors library.

A header is a stranger's claim about a file: its length is capped, its offsets must tile the file exactly, its number
formats must be known ones, and an index may name plain files beside it only.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from fleetune.models.config import read_json_object
from fleetune.spec.errors import UserError
from fleetune.spec.safetensors_header import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
#: What belongs to a model besides its weights: all of it is data.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
)
#: Pickles, whatever they are called: reading one runs its code.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
#: safetensors' number formats -> bytes of an element. The packed ones (F8, F4, ...) belong to quantised models.
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: safetensors' name of its number format, its shape, and where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files. Raises UserError: none, pickles only, an index that leads elsewhere, a part absent."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise UserError(_no_weights(folder))
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map: download the model again")
    names = sorted({str(name) for name in weight_map.values()})
    problems = [
        f"{index} names the file {name!r}, which is no plain name of a safetensors file: do not use this model"
        for name in names
        if not _is_plain(name)
    ]
    problems += [
        f"{index} names {name}, which is not in the folder: download the model again"
        for name in names
        if _is_plain(name) and not (folder / name).is_file()
    ]
    if problems:
        raise UserError(*problems)
    return [folder / name for name in names]


def companion_files(folder: Path) -> list[Path]:
    """What belongs to the model besides its weights, by name."""
    found = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, by name. Raises UserError for a header that does not describe the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if length > MAX_HEADER_BYTES:
            raise UserError(f"{path} claims a header of {length:,} bytes, and at most {MAX_HEADER_BYTES:,} are allowed")
        if not 2 <= length <= size - 8:
            raise _damaged(path, f"its header should be {length:,} bytes long and the file has {size:,}")
        text = file.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is no JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    at = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at:
            raise _damaged(path, f"{name} starts at byte {tensor.start:,} where {at:,} is expected")
        at = tensor.end
    if at != size:
        raise _damaged(path, f"its tensors end at byte {at:,} and the file at {size:,}")
    return tensors


def number_formats(folder: Path) -> set[str]:
    """safetensors' names of the floating-point formats that the folder's weights are stored in. Checks every header."""
    formats: set[str] = set()
    for path in weight_files(folder):
        formats |= {tensor.dtype for tensor in read_header(path).values()}
    return formats & FLOATING


def _stored(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _damaged(path, f"{name} is not described")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in _ELEMENT_BYTES:
        raise UserError(
            f"{path} stores {name} as {dtype}, and weights are one of {', '.join(_ELEMENT_BYTES)}: give the unquantised model"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(path, f"shape {shape} or offsets {offsets} of {name} are no lists of sizes")
    start, end = offsets
    wanted = math.prod(shape) * _ELEMENT_BYTES[dtype]
    if end - start != wanted:
        raise _damaged(path, f"{name} has {end - start:,} bytes, and its shape {shape} in {dtype} needs {wanted:,}")
    return StoredTensor(dtype, tuple(shape), base + start, base + end)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _is_plain(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith((".", "-")) and not any(c in name for c in "/\\\0:")


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged: {what}: download the file again")


def _no_weights(folder: Path) -> str:
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    if pickles:
        return (
            f"{folder} has its weights as {', '.join(pickles[:3])}, which are pickles: reading one runs whatever code is in "
            "it, so fleetune never does. Convert it where nothing is at stake, with "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) of transformers, and give NEW_FOLDER"
        )
    return f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}: give a folder that holds a model's weights"
