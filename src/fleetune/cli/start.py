"""Starting a run that was worked out: its folder, what is written into it, its supervisor, and what is left if it fails."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetune.cli.intent import Intent, with_plan
from fleetune.launch.lease import Lease
from fleetune.launch.request import Launch
from fleetune.launch.supervisor import supervise
from fleetune.monitor.progress import ProgressView
from fleetune.spec.errors import EXIT_USER, UserError
from fleetune.spec.read import Resolved, write_run
from fleetune.spec.resume import check_resume
from fleetune.spec.run_folder import RunFolder, read_json, write_json

#: What was found and fetched before stays as it is: the processes of a run open no connection.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
#: Entries that a start which died early may have left; anything else in a folder without a run is somebody's.
_OURS = re.compile(r"logs|checkpoints|outcomes|heartbeat|lease\.json|\.lease.*|plan\.json|quarantine\.jsonl|\..*\.tmp")
_KEPT = "quarantine.jsonl"


@dataclass(frozen=True)
class Finished:
    """A run that has ended, well or not. said: what its supervisor told the person."""

    folder: RunFolder
    exit_code: int
    said: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What the person must mend, as it was said."""
        return [line.removeprefix("error: ") for line in self.said if line.startswith("error: ")]

    def summary(self) -> dict[str, Any]:
        """The content of summary.json. Raises OSError where the run has none."""
        return read_json(self.folder.summary)


def start(intent: Intent, *, tell: Callable[[str], None]) -> Finished:
    """Make or open the run folder, start the run and watch it to its end. Raises UserError where nothing was started.

    tell: gets lines for the person. A new folder is removed again when the preparation finds something to mend.
    """
    folder = RunFolder(Path(intent.spec.output.run or default_path(intent)).absolute())
    resolved = with_plan(intent).with_values({"run": str(folder.path)})
    notes = _check_folder(folder, intent, resolved)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        tell(line)

    with _opened(folder) as opened:
        write_json(folder.plan, intent.plan.to_json())
        write_run(folder, resolved)
        for note in notes:
            say(f"note: {note}")
        with ProgressView(folder, stream=sys.stderr, level=intent.spec.output.log_level) as view:
            code = supervise(folder, _launch(intent), on_poll=view.poll, say=say, lease=opened.lease)
        opened.failed = code == EXIT_USER and not folder.prepared.exists()
    return Finished(folder, code, said)


def _launch(intent: Intent) -> Launch:
    return Launch(
        num_processes=intent.num_processes,
        threads=intent.spec.layout.threads,
        environment=_OFFLINE,
        prepare_arguments=("--device", intent.device),
    )


def default_path(intent: Intent) -> Path:
    """`runs/<model>-<data>-<time>`, one that is not there."""
    data = Path(intent.spec.rows.data[0]).stem
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{intent.located.name}-{data}").strip("-.")[:60]
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number, path = 1, stem
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def _check_folder(folder: RunFolder, intent: Intent, resolved: Resolved) -> tuple[str, ...]:
    """Refuse a folder that this run may not use, before anything in it is touched. Returns notes for the person."""
    path = folder.path
    if intent.earlier is not None:
        return check_resume(intent.earlier, resolved)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"run {path} is a file or a link, and a run needs a folder of its own: give another --run")
    if folder.exists():
        raise UserError(f"run {path} is there already: give --resume to go on with it, or another --run for a new one")
    strange = sorted(name for name in os.listdir(path) if not _OURS.fullmatch(name)) if path.is_dir() else []
    if strange:
        raise UserError(f"run {path} holds {strange[0]!r}, which belongs to no run: give a new folder as --run")
    return ()


@dataclass
class _Opened:
    """A run folder that is ours. failed: the start came to nothing, so that a new folder is taken back."""

    lease: Lease
    failed: bool = True


@contextmanager
def _opened(folder: RunFolder) -> Iterator[_Opened]:
    """The folder, made where it is not there, with its lease. What a start that failed has made new is taken back."""
    made = _missing(folder.path)
    was_run = folder.exists()
    opened = None
    try:
        folder.create()
        with Lease.take(folder) as lease:
            if folder.exists() and not was_run:
                raise UserError(
                    f"another run has just begun in {folder.path}: give another --run, or --resume to go on with it"
                )
            opened = _Opened(lease)
            try:
                yield opened
            finally:
                if opened.failed and not was_run:
                    _clear(folder)
    finally:
        if (opened is None or opened.failed) and not was_run:
            _remove_empty(folder, made)


def _missing(path: Path) -> list[Path]:
    """The folders of `path` that do not exist yet, the innermost first."""
    return [place for place in (path, *path.parents) if not place.exists()]


def _clear(folder: RunFolder) -> None:
    """Take back what a start that came to nothing has written; rows that were set aside stay, to be mended."""
    for entry in folder.path.iterdir():
        if entry.name == _KEPT or entry.name.startswith(".lease") or entry == folder.lease:
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _remove_empty(folder: RunFolder, made: list[Path]) -> None:
    """Remove the folders that this start has made, unless something of worth lies in them."""
    if not folder.path.is_dir() or folder.exists():
        return
    left = [entry for entry in folder.path.iterdir() if entry != folder.lease and not entry.name.startswith(".lease")]
    if any(entry.is_file() or any(entry.iterdir()) for entry in left):
        return
    for entry in folder.path.iterdir():
        entry.rmdir() if entry.is_dir() else entry.unlink()
    for place in made:
        try:
            place.rmdir()
        except OSError:
            return  # another run has come to live there
