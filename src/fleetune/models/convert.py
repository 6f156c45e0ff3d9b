"""A model folder becomes the same model in another number format, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fleetune.models.config import CONFIG_FILE, code_files, read_json_object, without_dangerous_keys
from fleetune.models.weight_files import FLOATING, companion_files, read_weights_header
from fleetune.models.weight_writer import PRECISIONS, Planned, write_weights
from fleetune.spec.safetensors_header import INDEX_FILE, SINGLE_FILE, weight_files

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def convert_folder(source: Path, folder: Path, *, dtype: str, code: bool = False) -> None:
    """Write the model of `source` into the existing, empty `folder`, its floating-point weights in `dtype`.

    Keeps the division into files. dtype: fp32, bf16 or fp16. code: copy the model's Python files too.
    """
    from safetensors import safe_open

    wanted = PRECISIONS[dtype][0]
    total = 0
    for path in weight_files(source):
        planned = [
            Planned(name, wanted if tensor.dtype in FLOATING else _TORCH_NAMES[tensor.dtype], tensor.shape)
            for name, tensor in read_weights_header(path).items()
        ]
        total += sum(tensor.num_bytes for tensor in planned)
        with safe_open(path, framework="pt") as file:
            write_weights(folder / path.name, planned, file.get_tensor)
    _write_index(source, folder, total)
    for path in [*companion_files(source), *(code_files(source) if code else [])]:
        if path.name != CONFIG_FILE:
            shutil.copyfile(path, folder / path.name)
    config = read_json_object(source / CONFIG_FILE)
    config.pop("torch_dtype", None)
    config["dtype"] = wanted
    _write_json(folder / CONFIG_FILE, config if code else without_dangerous_keys(config))


def _write_index(source: Path, folder: Path, total: int) -> None:
    if (source / SINGLE_FILE).is_file():  # then an index beside it counts for nothing
        return
    index = read_json_object(source / INDEX_FILE)
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": index["weight_map"]})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
