"""The result of a run: an adapter folder that plain PEFT loads, or a model folder that plain transformers loads.

Written aside and renamed: a folder that is there is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetune.spec.errors import CheckFailed


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and is removed when it does not."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True, mode=0o700)
    try:
        yield temporary
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Put `temporary` where `folder` is. A rename cannot replace a full folder: the old one steps aside first."""
    for file in temporary.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def check_saved(folder: Path, names: set[str]) -> None:
    """Every tensor that was trained is in the saved files, whole. Raises CheckFailed naming the first that is not.

    Sharded trainers are known to save empty or half adapters without a word; reading back the headers costs nothing.
    """
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            found.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    for name in sorted(names):
        if name not in found:
            raise CheckFailed(f"{folder} lacks the tensor {name}: it was trained, and was not saved")
        if 0 in found[name]:
            raise CheckFailed(f"{folder} has {name} with shape {found[name]}: an empty tensor was saved in its place")
