"""What belongs to a model folder, and the number formats of its weights. No torch, no safetensors library."""

from __future__ import annotations

from pathlib import Path

from fleetune.spec.errors import UserError
from fleetune.spec.safetensors_header import read_header, weight_files
from fleetune.spec.stored_tensor import StoredTensor

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
#: Number formats of an unquantised model. The packed ones (F8, F4, ...) belong to quantised models.
_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
FLOATING = frozenset({"F64", "F32", "F16", "BF16"})


def companion_files(folder: Path) -> list[Path]:
    """What belongs to the model besides its weights, by name."""
    found = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def read_weights_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file of unquantised weights, by name. Raises UserError for another header, or packed formats."""
    tensors = read_header(path)
    for name, tensor in tensors.items():
        if tensor.dtype not in _PLAIN:
            raise UserError(
                f"{path} stores {name} as {tensor.dtype}, not as one of {', '.join(_PLAIN)}: give the unquantised model"
            )
    return tensors


def number_formats(folder: Path) -> set[str]:
    """safetensors' names of the floating-point formats that the folder's weights are stored in. Checks every header."""
    formats: set[str] = set()
    for path in weight_files(folder):
        formats |= {tensor.dtype for tensor in read_weights_header(path).values()}
    return formats & FLOATING
