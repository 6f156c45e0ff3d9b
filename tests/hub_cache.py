"""Models in a hub cache of our own: found by their hub ids without any network."""

from __future__ import annotations

import shutil
from pathlib import Path

COMMIT = "b" * 40


def put(cache: Path, hub_id: str, folder: Path) -> None:
    """Lay the files of a model folder into the cache (HF_HUB_CACHE) as the only snapshot of `hub_id`."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


def environment(cache: Path) -> dict[str, str]:
    """What a process needs to find it, and to look nowhere else."""
    return {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
