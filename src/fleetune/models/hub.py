"""Models of the Hugging Face hub: only one that a person named is downloaded, and only data, never code or pickles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.models.weight_files import ADAPTER_CONFIG, COMPANIONS
from fleetune.spec.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
#: Files of these names and no others. `consolidated.safetensors` and the like hold the same weights a second time.
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """A model in the hub's local cache. commit: the commit that the asked revision is now."""

    folder: Path
    commit: str


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def fetch(hub_id: str, *, revision: str | None, offline: bool, code: bool = False) -> Snapshot:
    """The model `hub_id` in the hub's local cache; downloaded where that is allowed and needed. One process a node.

    offline: use what is there. code: fetch the model's Python files too. Raises UserError saying what to do.
    """
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UserError(f"revision {revision!r} of {hub_id} is no commit, tag or branch: leave it out, or copy it from the hub")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    offline = offline or constants.HF_HUB_OFFLINE
    patterns = [*_WEIGHTS, *COMPANIONS, ADAPTER_CONFIG, *(["*.py"] if code else [])]
    try:
        folder = snapshot_download(
            hub_id,
            revision=revision,
            local_files_only=offline,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            library_name="fleetune",
        )
    except LocalEntryNotFoundError as error:
        # Another tool may have fetched just the files that it needs, and they may be all that we need: the caller looks.
        partial = getattr(error, "snapshot_path", None)
        if partial is None:
            raise UserError(_not_here(hub_id, revision, offline, error)) from error
        folder = partial
    except Exception as error:
        raise UserError(_failed(hub_id, revision, error)) from error
    return Snapshot(Path(folder), Path(folder).name)


def _not_here(hub_id: str, revision: str | None, offline: bool, error: Exception) -> str:
    which = f"{hub_id} (revision {revision})" if revision else hub_id
    if offline:
        return (
            f"model {which} is not in the hub's local cache, and the network is off (--offline or HF_HUB_OFFLINE): run once "
            f"without it, or fetch it elsewhere with `hf download {hub_id}` and copy the folder here"
        )
    return (
        f"model {which} is not in the hub's local cache, and the hub cannot be reached ({_first_line(error)}): try again later"
    )


def _failed(hub_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"model {hub_id} is gated: accept its licence at https://huggingface.co/{hub_id} and log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"model {hub_id} has no revision {revision!r}: give a commit, tag or branch that its page on the hub shows"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"model {hub_id} is not on the hub, or is private: check the name, or log in with `hf auth login`"
    return f"model {hub_id} could not be fetched from the hub ({_first_line(error)}): check disk and network and try again"


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
