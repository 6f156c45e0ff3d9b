"""Safetensors files as bytes: the one reader of their headers and of a model folder's index of them.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian length, that many bytes of JSON
`{name: {dtype, shape, data_offsets}}`, then the bytes of all tensors without gaps. A header is a stranger's claim about a
file: its length is checked before anything is read for it, its number formats are known ones, no name stands twice (two
readers could each take another one), and its offsets tile the file exactly.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.stored_tensor import VALUE_BYTES, StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: A longer header is refused before it is read. The safetensors library has the same limit.
MAX_HEADER_BYTES = 100_000_000
#: As many dims as torch itself allows.
MAX_DIMS = 64
#: Pickles, whatever they are called: reading one runs its code.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files. Raises UserError: none, pickles only, an index that leads elsewhere, a part absent."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise UserError(_no_weights(folder))
    try:
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise UserError(f"{index} has more than {MAX_HEADER_BYTES:,} bytes: do not use this model")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is no index of weights ({str(error)[:200]}): download the model again") from None
    problems = [f"{index} names no file: download the model again"] if not names else []
    for name in names:
        if not _is_plain(name):
            problems.append(
                f"{index} names the file {name!r}, which is no plain name of a safetensors file: do not use this model"
            )
        elif not (folder / name).is_file():
            problems.append(f"{index} names the file {name}, which is not in the folder: download the model again")
    raise_if_any(problems)
    return [folder / name for name in names]


def read_model_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder by stored name. Raises UserError: no safetensors, a damaged or dishonest file."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        found = read_header(path)
        twice = sorted(set(found) & set(tensors))
        raise_if_any([f"{path} holds {twice[0]}, as another file of the model does: download it again"] if twice else [])
        tensors.update(found)
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises UserError for whatever is no honest header."""
    try:
        with open(path, "rb") as file:
            return parse_header(file, path.stat().st_size)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}: download the file again") from None


def parse_header(file: BinaryIO, size: int) -> dict[str, StoredTensor]:
    """The tensors of an open file of `size` bytes, from its start. Raises ValueError that says what is wrong.

    Every length is checked before anything is read or allocated for it: a hostile file costs no memory.
    """
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ValueError(f"{size} bytes are too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {length:,} bytes, more than the {MAX_HEADER_BYTES:,} allowed")
    if length > size - 8:
        raise ValueError(f"its header claims {length:,} bytes, and the file has {size:,}")
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=without_duplicates)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"its header is no JSON ({str(error)[:200]})") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, 8 + length) for name, entry in header.items()}
    _check_tiling(tensors, 8 + length, size)
    return tensors


def is_counts(value: Any) -> bool:
    """Whether `value` is a short list of whole numbers from 0 that fit 63 bits (True is no number here)."""
    return isinstance(value, list) and len(value) <= MAX_DIMS and all(type(item) is int and 0 <= item < 2**63 for item in value)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: a key given twice is an error."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is given twice")
    return value


def _tensor(name: str, entry: Any, data_start: int) -> StoredTensor:
    said = repr(name[:80])
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {said} has not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in VALUE_BYTES:
        raise ValueError(f"tensor {said} has the number format {str(dtype)[:40]!r}, which is not known")
    if not is_counts(shape) or not is_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the shape or data_offsets of tensor {said} are not whole numbers from 0")
    start, end = offsets
    num_bytes = math.prod(shape) * VALUE_BYTES[dtype]
    if end - start != num_bytes:
        raise ValueError(f"tensor {said} at bytes {offsets} does not fit its shape {shape} in {dtype}")
    return StoredTensor(tuple(shape), dtype, num_bytes, data_start + start)


def _check_tiling(tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != at:
            raise ValueError(f"the tensors leave a gap or overlap at byte {at:,}, before {name[:80]!r}")
        at = tensor.end
    if at != size:
        raise ValueError(f"the tensors take {at - start:,} bytes, and the file has {size - start:,} behind its header")


def _is_plain(name: str) -> bool:
    """Whether the name can only mean a file beside the index."""
    return name.endswith(".safetensors") and not name.startswith((".", "-")) and not any(c in name for c in "/\\\0:")


def _no_weights(folder: Path) -> str:
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    if pickles:
        return (
            f"{folder} has its weights as {', '.join(pickles[:3])}, which are pickles: reading one runs whatever code is in "
            "it, so fleetune never does. Convert it where nothing is at stake, with "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) of transformers, and give NEW_FOLDER"
        )
    return f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}: give a folder that holds a model's weights"
