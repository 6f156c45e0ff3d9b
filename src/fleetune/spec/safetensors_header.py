"""What a model folder's safetensors files say of their tensors, read from their headers as bytes.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian length, that many bytes of JSON
`{name: {dtype, shape, data_offsets}}`, then the data.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.stored_tensor import FLOAT_BYTES, MAX_VALUES, OTHER_BYTES, StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20
MAX_DIMS = 16


def read_model_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder by stored name. Raises UserError: no safetensors, a damaged or dishonest file."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
        beside = f" (only {', '.join(pickled[:3])}, which is pickled and never read)" if pickled else ""
        raise UserError(
            f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}{beside}: give a folder with safetensors weights, or save it as "
            "such with transformers' save_pretrained"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in _shard_names(index):
        found = read_header(folder / name)
        twice = sorted(set(found) & set(tensors))
        raise_if_any(
            [f"{folder / name} holds {twice[0]}, as another file of the model does: download it again"] if twice else []
        )
        tensors.update(found)
    return tensors


def _shard_names(index: Path) -> list[str]:
    """File names of an index: plain names in its own folder only, so that no index can point elsewhere."""
    try:
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise UserError(f"{index} has more than {MAX_HEADER_BYTES:,} bytes: do not use this model")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is no index of weights ({error}): download the model again") from None
    problems = []
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name or "\\" in name:
            problems.append(f"{index} names the file {name!r}, which is no plain safetensors name: do not use this model")
        elif not (index.parent / name).is_file():
            problems.append(f"{index} names the file {name}, which is not there: download the model again")
    raise_if_any(problems)
    return names


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises UserError for whatever is no honest header."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, f"its header says it has {length:,} bytes, and the file has {size:,}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, size - 8 - length) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: Any, data_bytes: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_sound = all(type(dim) is int and dim >= 0 for dim in (*shape, begin, end)) and len(shape) <= MAX_DIMS
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise _damaged(path, f"its header describes {name!r} wrongly")
    value_bytes = FLOAT_BYTES.get(dtype) or OTHER_BYTES.get(dtype)
    if value_bytes is None:
        raise UserError(f"{path} holds {name!r} as {dtype!r}, which fleetune does not read: give plain weights")
    if not begin <= end <= data_bytes:
        raise _damaged(path, f"{name!r} ends at byte {end:,} of {data_bytes:,}")
    if math.prod(shape) > MAX_VALUES or math.prod(shape) * value_bytes != end - begin:
        raise _damaged(path, f"{name!r} has shape {shape} and {end - begin:,} bytes")
    return StoredTensor(tuple(shape), dtype, end - begin)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged: {why}. Download it again")
