"""Weights made ready for training, once a node: an ordinary model folder, in the number format that is asked for.

Every process of a node maps the frozen weights from that folder, so they must lie there exactly as they are used. A folder
that already has them so is used where it is; from anything else a copy is made in the cache, keyed by content, number
format and what makes it. A copy that is there is found without importing torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fleetune.models.cache import cache_folder, lock
from fleetune.models.config import CONFIG_FILE, code_files, read_config
from fleetune.models.locate import Located
from fleetune.models.weight_files import ADAPTER_FILE, FLOATING, number_formats, read_weights_header
from fleetune.spec.errors import UserError
from fleetune.spec.safetensors_header import weight_files

#: Raised whenever the conversion of the same bytes would give another folder.
_CODE_VERSION = 1
_STORED_AS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_WIDTH_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: What a conversion writes besides weights (tokenizer and config), at most about this much.
_SPARE_BYTES = 64 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedModel:
    """A model that every process of this node can map. adapter: a PEFT adapter to go on with. fingerprint: of the content
    it was made from, whatever the number format."""

    folder: Path
    adapter: Path | None
    fingerprint: str


def prepare_model(located: Located, *, dtype: str, allow_remote_code: bool = False) -> PreparedModel:
    """The located model with its weights in `dtype` (fp32, bf16 or fp16). Once a node; several processes may call it at once.

    Raises UserError: damaged or quantised weights, code that nobody allowed, values that fp16 cannot hold, a full disk.
    """
    if dtype not in _STORED_AS:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(_STORED_AS)}")
    if located.adapter is not None:
        read_weights_header(located.adapter / ADAPTER_FILE)
    if located.kind == "folder":
        values = read_config(located.path)
        if "auto_map" in values and allow_remote_code:
            names = ", ".join(path.name for path in code_files(located.path)) or "none"
            _log.warning("Python files that come with the model and will be run: %s", names)
        if number_formats(located.path) == {_STORED_AS[dtype]}:
            return PreparedModel(located.path, located.adapter, located.fingerprint)
    folder = _converted(located, dtype=dtype, code=allow_remote_code)
    return PreparedModel(folder, located.adapter, located.fingerprint)


def _converted(located: Located, *, dtype: str, code: bool) -> Path:
    """The folder in the cache that holds the model in `dtype`; made if it is not there."""
    models = cache_folder("models")
    name = f"{located.base_fingerprint[:32]}-{dtype}-{_CODE_VERSION}"
    if located.kind == "gguf":
        name += f"-transformers-{metadata.version('transformers')}"  # it translates config and tokenizer
    folder = models / (f"{name}-code" if code else name)
    if _is_whole(folder):
        return folder
    with _saying_what_failed(located, models), lock(models / f".{folder.name}.lock"):
        if _is_whole(folder):  # another process made it while we waited
            return folder
        for stale in models.glob(f".{folder.name}.*.tmp"):  # nobody works on it: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        _check_space(located, models, dtype)
        _log.info("converting %s to %s, once: it is kept in %s", located.source, dtype, folder)
        began = time.monotonic()
        aside = models / f".{folder.name}.{os.getpid()}.tmp"
        aside.mkdir(mode=0o700)
        try:
            _convert(located, aside, dtype=dtype, code=code)
            _sync_folder(aside)
            if folder.exists():
                shutil.rmtree(folder)  # what is there is not whole: somebody deleted files of it
            os.rename(aside, folder)
            _sync_folder(models)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _log.info("converted %s in %.1f s", located.source, time.monotonic() - began)
    return folder


def _convert(located: Located, folder: Path, *, dtype: str, code: bool) -> None:
    if located.kind == "gguf":
        from fleetune.models.gguf import convert_gguf

        convert_gguf(located.path, folder, dtype=dtype)
    else:
        from fleetune.models.convert import convert_folder

        convert_folder(located.path, folder, dtype=dtype, code=code)


def _is_whole(folder: Path) -> bool:
    """A folder appears by one rename, so it is whole unless somebody deleted from it (a cleaner of caches)."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    try:
        for path in weight_files(folder):
            read_weights_header(path)
    except UserError:
        return False
    return True


def _check_space(located: Located, models: Path, dtype: str) -> None:
    needed = _num_elements(located) * _WIDTH_BYTES[dtype] + _SPARE_BYTES
    free = shutil.disk_usage(models).free
    if needed > free:
        raise UserError(
            f"converting {located.source} to {dtype} needs {needed / 1e9:.1f} GB, and {models} has {free / 1e9:.1f} GB free: "
            "make room, or set FLEETUNE_CACHE to a folder on a larger disk"
        )


def _num_elements(located: Located) -> int:
    if located.kind == "gguf":
        from fleetune.models.gguf_file import GgufFile

        return sum(math.prod(tensor.shape) for tensor in GgufFile.read(located.path).tensors.values())
    headers = (read_weights_header(path) for path in weight_files(located.path))
    return sum(math.prod(tensor.shape) for header in headers for tensor in header.values() if tensor.dtype in FLOATING)


@contextlib.contextmanager
def _saying_what_failed(located: Located, models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{located.source} could not be converted in {models} ({error.strerror or error}): make room there, or set "
            "FLEETUNE_CACHE to a folder you can write to"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
