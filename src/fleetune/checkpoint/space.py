"""Disk space: what checkpoints will need, and words for what is missing."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

#: Errors that mean that a file could not grow, and what a person can do.
FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the largest allowed file size is reached (see ulimit -f)",
}


def bytes_needed(*, checkpoint_bytes: int, keep: int, keeps_best: bool) -> int:
    """Bytes of all checkpoints that lie on the disk at once: those kept, the best one, and the one being written."""
    return checkpoint_bytes * (keep + int(keeps_best) + 1)


def space_warning(folder: Path, *, checkpoint_bytes: int, keep: int, keeps_best: bool) -> str | None:
    """What to tell a person at the start when the checkpoints of a run will not fit, else None. `folder` may not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    needed = bytes_needed(checkpoint_bytes=checkpoint_bytes, keep=keep, keeps_best=keeps_best)
    held = sum(file.stat().st_size for file in folder.glob("step-*/*") if file.is_file()) if folder.exists() else 0
    free = shutil.disk_usage(existing).free
    missing = needed - held - free
    if missing <= 0:
        return None
    return (
        f"the checkpoints of this run will need {bytes_text(needed)} in {folder} ({bytes_text(checkpoint_bytes)} each, "
        f"--keep-checkpoints {keep}, one being written{', the best one' if keeps_best else ''}), and {bytes_text(free)} are "
        f"free: free {bytes_text(missing)} more, lower --keep-checkpoints, or give --run a folder on a larger disk"
    )


def missing_text(code: int | None, *, needed_bytes: int, free_bytes: int, folder: Path) -> str:
    """How much room a save lacked, and what to do; empty where the error was not one of room."""
    if code not in FULL:
        return ""
    missing = needed_bytes - free_bytes
    if missing > 0:
        return (
            f"; {FULL[code]}: the checkpoint needs {bytes_text(needed_bytes)}, {bytes_text(free_bytes)} are free in {folder}: "
            f"{bytes_text(missing)} are missing. Free them, lower --keep-checkpoints, or use a larger disk"
        )
    return f"; {FULL[code]}: the checkpoint needs {bytes_text(needed_bytes)}. Make room for it in {folder}"


def bytes_text(count: int) -> str:
    """`1.5 GB`, in powers of 1000 as disks are sold; whole bytes below 1 kB."""
    if count < 1000:
        return f"{count} bytes"
    value, units = count / 1000, ["kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.1f} {units[0]}"
