"""A run whose processes a foreign launcher has started: `torchrun`, or `python -m torch.distributed.run`, on every node.

Each process is one rank; nothing is started and nothing supervised. Rank 0 works out what is asked and writes the run folder;
the first rank of each node prepares model and rows; then all train, in these very processes. A restart by the launcher goes
on from the last complete checkpoint.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.cli.intent import Intent, with_plan, work_out
from fleetune.cli.place import opened
from fleetune.cli.smoke import refuse
from fleetune.cli.start import Finished
from fleetune.launch.ending import next_attempt
from fleetune.monitor.progress import ProgressView
from fleetune.spec.errors import EXIT_CRASH, EXIT_USER, UserError
from fleetune.spec.given import Source
from fleetune.spec.read import write_run
from fleetune.spec.run_folder import RunFolder, read_json, write_json

if TYPE_CHECKING:
    from fleetune.parallel.foreign import Meeting

#: What a launcher tells each of its processes.
_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def is_foreign(environment: Mapping[str, str]) -> bool:
    """Whether a launcher that is not ours has started this process as one of its ranks."""
    return all(environment.get(name) for name in _TOLD) and "FLEETUNE_STORE" not in environment


def start_as_rank(flags: Source, file: Path | None, *, tell: Callable[[str], None], show: Callable[[Intent], None]) -> Finished:
    """Take part in the run as this process's rank; returns when it has ended. Raises UserError, on rank 0 with all problems.

    tell, show: for a person; only rank 0 uses them.
    """
    from fleetune.parallel.foreign import Meeting

    meeting = Meeting()
    if meeting.place.rank:
        return _follow(meeting)
    try:
        intent = _asked(flags, file, meeting)
        show(intent)
        folder = intent.folder
        with opened(folder) as place:
            write_json(folder.plan, intent.plan.to_json())
            write_run(folder, with_plan(intent.resolved, intent.plan).with_values({"run": str(folder.path)}))
            meeting.remember("folder", str(folder.path))
            attempt = next_attempt(folder)
            meeting.say(
                "asked", {"folder": str(folder.path), "device": intent.device, "attempt": attempt, "run": _text(folder)}
            )
            with _watched(folder, intent):
                code = _train(meeting, folder, intent.device, attempt)
            place.failed = code == EXIT_USER and not folder.prepared.exists()
    except UserError as error:
        meeting.say("asked", {"problems": list(error.problems)})
        raise
    return Finished(folder, code, _said(folder, attempt, 0, tell))


def _asked(flags: Source, file: Path | None, meeting: Meeting) -> Intent:
    """What is asked, for the ranks that there are. A restart goes on in the folder of the first start."""
    values: dict[str, Any] = dict(flags.values)
    earlier = meeting.recall("folder") if meeting.restart else None
    if earlier is not None and RunFolder(Path(earlier)).exists():
        values |= {"run": earlier, "resume": True}
    intent = work_out(Source(flags.kind, values), file, processes=meeting.place.world_size)
    refuse(intent, "a foreign launcher's ranks")
    return intent


def _follow(meeting: Meeting) -> Finished:
    """Every rank but the first."""
    asked = meeting.hear("asked")
    if "problems" in asked:
        raise UserError("rank 0 has found something to mend: see what it says")
    folder, attempt = RunFolder(Path(asked["folder"])), int(asked["attempt"])
    if not folder.spec.exists() and meeting.place.local_rank == 0:
        # A node of its own, without the first one's disk.
        folder.create()
        folder.spec.write_text(asked["run"], encoding="utf-8")
    return Finished(folder, _train(meeting, folder, asked["device"], attempt), [])


def _train(meeting: Meeting, folder: RunFolder, device: str, attempt: int) -> int:
    """Prepare once a node, and train; returns this rank's exit code."""
    from fleetune.training import prepare, worker

    place = meeting.place
    if place.local_rank == 0:
        words = [str(folder.path), "--device", device, "--node", str(place.node)]
        if place.node == 0:
            meeting.say("precision", _precision(folder, device))
        elif (decided := meeting.hear("precision")) is not None:
            words += ["--precision", decided]
        meeting.say(f"prepared-{place.node}", prepare.main(words))
    code = int(meeting.hear(f"prepared-{place.node}"))
    codes = [code, *(int(meeting.hear(f"prepared-{node}")) for node in range(place.num_nodes))]
    if any(codes):
        return EXIT_USER if EXIT_USER in codes else EXIT_CRASH
    return worker.run(folder, attempt)


def _precision(folder: RunFolder, device: str) -> str | None:
    """What all nodes compute in, which the first one decides; None where it cannot: its preparation will say why."""
    from fleetune.spec.read import read_run
    from fleetune.training.prepare import decide_precision

    try:
        return decide_precision(read_run(folder).spec, folder, device=device)
    except UserError:
        return None


@contextmanager
def _watched(folder: RunFolder, intent: Intent) -> Iterator[None]:
    """Show the progress meanwhile, from a thread: this process itself computes."""
    output = intent.spec.output
    over = threading.Event()
    with ProgressView(folder, stream=sys.stderr, level=output.log_level, every=intent.spec.trackers.log_every) as view:

        def look() -> None:
            while not over.wait(0.5):
                view.poll()

        thread = threading.Thread(target=look, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _said(folder: RunFolder, attempt: int, rank: int, tell: Callable[[str], None]) -> list[str]:
    """What a rank's outcome says that is no success."""
    path = folder.outcome(rank, attempt)
    outcome = read_json(path) if path.exists() else {}
    if outcome.get("kind") in (None, "done"):
        return []
    prefix = "" if outcome["kind"] == "preempted" else "error: "
    said = [f"{prefix}{line}" for line in str(outcome.get("cause", "")).splitlines()]
    if outcome["kind"] != "user":  # which the worker has said itself
        for line in said:
            tell(line)
    return said


def _text(folder: RunFolder) -> str:
    return folder.spec.read_text(encoding="utf-8")


def is_first() -> bool:
    """Whether this process is the rank that speaks."""
    return os.environ.get("RANK", "0") == "0" or not is_foreign(os.environ)
