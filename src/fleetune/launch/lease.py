"""Who may run in a run folder: at most one live supervisor at a time.

`lease.json` names the generation and its holder. To take it, a process makes the file of the next generation's claim by
exclusive creation, which only one can, and then renames its lease over `lease.json`. A claim without a lease belongs to a
process between these two, or to one that died there.
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, final

from fleetune.launch.identity import Identity
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_json, write_json

_CLAIM = re.compile(r"\.lease-(\d+)\.json")


@final
class Lease:
    """The right to run in a folder, held by this process until `release` (or the end of the `with`)."""

    def __init__(self, folder: RunFolder, generation: int) -> None:
        self.folder = folder
        self.generation = generation

    @staticmethod
    def take(folder: RunFolder) -> Lease:
        """Take the lease of a folder that exists. Raises UserError naming the holder where a live process has it."""
        for _ in range(100):
            generation, holder = _current(folder)
            if holder is not None and _is_live(holder):
                raise UserError(_refusal(folder, holder))
            mine = generation + 1
            if not _claim(folder, mine):
                continue  # somebody else was faster: look again who
            if _read(folder.lease).get("generation", 0) >= mine:
                # What we saw is long past: others have come and gone, and the claim we made was of theirs.
                _claim_path(folder, mine).unlink(missing_ok=True)
                continue
            write_json(folder.lease, {"generation": mine, "holder": _myself()})
            for number, path in _claims(folder):
                if number < mine:
                    path.unlink(missing_ok=True)
            return Lease(folder, mine)
        raise UserError(f"too many processes want to run in {folder.path} at once: start one of them")

    def release(self) -> None:
        """Give the lease back. The generation stays, so that the next holder's is higher."""
        if _read(self.folder.lease).get("generation") == self.generation:
            write_json(self.folder.lease, {"generation": self.generation, "holder": None})
        _claim_path(self.folder, self.generation).unlink(missing_ok=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def live_holder(folder: RunFolder) -> dict[str, Any] | None:
    """Who runs in a folder (`pid`, `host`, ...), or None where nobody does."""
    _, holder = _current(folder)
    return holder if holder is not None and _is_live(holder) else None


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": Identity.of(os.getpid()).mark,
        "since": round(time.time(), 3),
    }


def _current(folder: RunFolder) -> tuple[int, dict[str, Any] | None]:
    """The highest generation, and who holds it (None: nobody any more)."""
    lease = _read(folder.lease)
    generation, holder = int(lease.get("generation", 0)), lease.get("holder")
    for number, path in _claims(folder):
        if number > generation:
            generation, holder = number, _read(path).get("holder")
    return generation, holder if isinstance(holder, dict) else None


def _claim(folder: RunFolder, generation: int) -> bool:
    """Make the claim of a generation, whole or not at all. False where it exists."""
    path = _claim_path(folder, generation)
    draft = folder.path / f".lease-draft.{os.getpid()}.{generation}"
    draft.unlink(missing_ok=True)
    write_json(draft, {"generation": generation, "holder": _myself()})
    try:
        os.link(draft, path)  # unlike a rename, it fails where the name is taken
    except FileExistsError:
        return False
    except OSError:
        return _claim_without_links(path, generation)
    finally:
        draft.unlink(missing_ok=True)
    return True


def _claim_without_links(path: Path, generation: int) -> bool:
    """For file systems without hard links: a reader may see the claim empty for a moment, and takes it for a live one."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    write_json(path, {"generation": generation, "holder": _myself()})
    return True


def _claims(folder: RunFolder) -> list[tuple[int, Path]]:
    found = ((_CLAIM.fullmatch(path.name), path) for path in folder.path.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def _claim_path(folder: RunFolder, generation: int) -> Path:
    return folder.path / f".lease-{generation:06d}.json"


def _read(path: Path) -> dict[str, Any]:
    """A lease or a claim; empty where there is none. What cannot be read is held by somebody unknown."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        match = _CLAIM.fullmatch(path.name)
        return {"generation": int(match[1]) if match else 0, "holder": {"host": "?", "pid": 0, "file": str(path)}}


def _is_live(holder: dict[str, Any]) -> bool:
    """Whether the holder may still run. Of another machine nothing is known, so it counts as live."""
    if holder.get("host") != socket.gethostname():
        return True
    return Identity(int(holder["pid"]), holder.get("started")).lives


def _refusal(folder: RunFolder, holder: dict[str, Any]) -> str:
    if "file" in holder:
        return f"{holder['file']} cannot be read, so it is not known who runs in {folder.path}: remove it if nobody does"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(holder.get("since", 0))))
    who = f"process {holder['pid']} on {holder['host']}, since {since}"
    here = holder["host"] == socket.gethostname()
    mend = f"wait for it, or stop it (kill {holder['pid']})" if here else f"wait for it; if {holder['host']} is gone for good, "
    if not here:
        mend += f"remove {folder.lease}"
    return f"a run is live in {folder.path} ({who}): {mend}, or give another --run"
