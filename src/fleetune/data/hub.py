"""Data sets of the Hugging Face hub: their JSON, CSV and Parquet files. No script of theirs is ever run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fleetune.data.rows import listed
from fleetune.data.sources import HELD_OUT, TRAINING
from fleetune.spec.errors import UserError

_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def fetch_data_set(name: str, *, offline: bool) -> Path:
    """The folder with the files of `org/name[/folder][@revision]`, downloaded into the hub's cache unless it is there.

    Raises UserError: no such data set, no network, several folders to choose from.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
    except ImportError:
        raise UserError(f"data {name!r} is a hub data set: install fleetune[hub], or give a local file") from None
    plain, _, revision = name.partition("@")
    repository, _, folder = re.sub(r"^([^/]+/[^/]+)/", r"\1\0", plain).partition("\0")
    if offline or constants.HF_HUB_OFFLINE:
        snapshot = _cached(hub, name, repository, revision or None)
    else:
        snapshot = _downloaded(hub, name, repository, folder, revision or None)
    place = snapshot / folder
    if not place.is_dir():
        raise UserError(
            f"data {name!r}: the data set has no folder {folder!r}: give one of {listed(_folders(_files(snapshot)))}"
        )
    choices = _folders(_files(place))
    if len(choices) > 1:
        raise UserError(f"data {name!r} has several sets: give one of {listed(f'{plain}/{choice}' for choice in choices)}")
    return place


def _cached(hub: Any, name: str, repository: str, revision: str | None) -> Path:
    try:
        return Path(hub.snapshot_download(repository, repo_type="dataset", revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UserError(
            f"data {name!r} is neither a local path nor in the hub's cache, and --offline or HF_HUB_OFFLINE forbids to look "
            "further: check the path, or run once without it"
        ) from error


def _downloaded(hub: Any, name: str, repository: str, folder: str, revision: str | None) -> Path:
    """Download the training files of `folder` only; what is in the cache already is not fetched again."""
    try:
        information = hub.HfApi().dataset_info(repository, revision=revision)
        names = [entry.rfilename for entry in information.siblings or []]
        wanted = _training(
            [found for found in names if found.endswith(_SUFFIXES) and found.startswith(f"{folder}/" if folder else "")]
        )
        choices = _folders(wanted)
        if len(choices) > 1:
            plain = name.partition("@")[0].rstrip("/")
            raise UserError(f"data {name!r} has several sets: give one of {listed(f'{plain}/{choice}' for choice in choices)}")
        if not wanted:
            raise UserError(f"data {name!r} has no files of rows ({', '.join(_SUFFIXES)}): it holds {listed(names)}")
        commit = information.sha
        return Path(hub.snapshot_download(repository, repo_type="dataset", revision=commit, allow_patterns=wanted))
    except UserError:
        raise
    except Exception as error:  # the hub's client raises its HTTP library's own kinds
        raise UserError(
            f"data {name!r} is no local path, and as a hub data set it cannot be fetched: {type(error).__name__}: {error}. "
            "Check the name, your access (`hf auth login`) and the network, or give a local file"
        ) from error


def _files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file()
    )


def _training(names: list[str]) -> list[str]:
    """Without the held-out files, where files say in their names that they are for training."""
    if not any(TRAINING.search(name) for name in names):
        return names
    return [name for name in names if not HELD_OUT.search(name)]


def _folders(names: list[str]) -> list[str]:
    """Top folders that hold files, where there are several; a folder `data` counts as the top itself."""
    return sorted({name.split("/")[0] for name in names if "/" in name} - {"data"})
