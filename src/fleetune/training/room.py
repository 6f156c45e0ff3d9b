"""How much of a step fits into memory: found out by failing, and remembered in `events.jsonl`.

A step that does not fit is taken in smaller micro-batches, which changes no mathematics: in place where memory ran out before
the ranks had talked, else by the next attempt, which finds here why the one before it died.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.spec.errors import UserError
from fleetune.spec.read import read_run
from fleetune.spec.run_folder import RunFolder, read_json, read_lines
from fleetune.training.progress import Run, event

if TYPE_CHECKING:
    from fleetune.parallel.world import World
    from fleetune.spec.run_spec import RunSpec

#: The event that is written before a micro-batch size is tried for the first time.
REHEARSAL = "rehearsal"

_REMEDIES = (
    "give a shorter --sequence-length, --method lora or a smaller --lora-rank, a smaller model, or devices with more memory"
)


@dataclass(frozen=True)
class Room:
    """What is known to fit. micro_batch_size: None where nothing was tried. cause: why it has just become less. may_grow:
    whether more may be tried, because nobody has given the size and nothing has failed yet."""

    micro_batch_size: int | None = None
    gradient_checkpointing: bool = False
    cause: str | None = None
    may_grow: bool = False

    def smaller(self, cause: str) -> Room:
        """What to try after this did not fit. Raises UserError where nothing is left to try."""
        size = self.micro_batch_size or 1
        if size > 1:
            return replace(self, micro_batch_size=size // 2, cause=cause, may_grow=False)
        if not self.gradient_checkpointing:
            return replace(self, gradient_checkpointing=True, cause=cause, may_grow=False)
        raise UserError(
            "a micro-batch of one sequence does not fit into memory, not even with gradient checkpointing "
            f"({cause}): {_REMEDIES}"
        )


def find_room(spec: RunSpec, folder: RunFolder, world: World) -> Room:
    """What fits, from the attempts before this one. All ranks, before the model is loaded. Raises UserError on all of them."""
    given = Room(spec.optimization.micro_batch_size, spec.optimization.gradient_checkpointing)
    if not spec.health.dynamic_batch_size:
        return given
    given = replace(given, may_grow=read_run(folder).origins["micro_batch_size"] in ("plan", "default"))
    answer: dict[str, Any] = {}
    if world.rank == 0:
        try:
            room = known_room(read_lines(folder.events), given)
            cause = why_short(folder, kills())
            answer = asdict(room if cause is None else room.smaller(cause))
        except UserError as error:
            answer = {"refused": str(error)}
    answer = world.broadcast_json(answer)
    if "refused" in answer:
        raise UserError(answer["refused"])
    return Room(**answer)


def known_room(rows: Iterable[Mapping[str, Any]], given: Room) -> Room:
    """What the events of a run say. A smaller micro-batch that the person gives meanwhile goes before."""
    size, checkpointing, may_grow = given.micro_batch_size, given.gradient_checkpointing, given.may_grow
    for row in rows:
        if row.get("event") == REHEARSAL and given.may_grow:
            size = row["micro_batch_size"]  # one that fitted, or the one that the attempt died of
        if row.get("event") == "out_of_memory":
            size = min(size or row["micro_batch_size"], row["micro_batch_size"])
            checkpointing, may_grow = checkpointing or row["gradient_checkpointing"], False
    return Room(size, checkpointing, may_grow=may_grow)


def why_short(folder: RunFolder, kills_now: int) -> str | None:
    """Why the last attempt ended, where it was for lack of memory; else None."""
    rows = list(read_lines(folder.events))
    failures = [row for row in rows if row.get("event") == "failure"]
    ends = [row for row in rows if row.get("event") in ("failure", "done") or row.get("kind") in ("user", "preempted")]
    if not failures or ends[-1] is not failures[-1]:
        return None
    last = failures[-1]
    starts = [row for row in rows if row.get("event") == "start" and row.get("attempt") == last.get("attempt")]
    before = next((row["oom_kills"] for row in starts if "oom_kills" in row), None)
    if before is not None and kills_now > before and "SIGKILL" in str(last.get("cause")):
        return f"the kernel killed rank {last.get('rank')} for lack of memory"
    for path in sorted(folder.outcomes.glob(f"rank-*-attempt-{int(last.get('attempt', 0)):03d}.json")):
        outcome = read_json(path)
        if outcome.get("detail", {}).get("out_of_memory"):
            return str(outcome["cause"])
    return None


def kills() -> int:
    """How many processes the kernel has killed for lack of memory: of this process's control group, else of the machine.

    0 where the system does not tell. Compared with an earlier count, it tells a kill by the kernel from one by somebody.
    """
    for path, key in (*_group_files(), (Path("/proc/vmstat"), "oom_kill")):
        try:
            counts = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) == 2)
        except OSError:
            continue
        if key in counts:
            return int(counts[key])
    return 0


def _group_files() -> list[tuple[Path, str]]:
    """Where the count of this process's control group stands: version 2, then version 1."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    root = Path("/sys/fs/cgroup")
    found = [(root / path.lstrip("/") / "memory.events", "oom_kill") for _, names, path in lines if not names]
    found += [
        (root / "memory" / path.lstrip("/") / "memory.oom_control", "oom_kill")
        for _, names, path in lines
        if "memory" in names.split(",")
    ]
    return found


def take_smaller(run: Run, step: int, cause: str) -> None:
    """After OutOfMemory in `step` (from 1), on all ranks: the rest of the run, from this step on, in smaller micro-batches.

    Raises MemoryError where the micro-batch is one sequence already: the next attempt has more to try.
    """
    size = run.progress.micro_batch_size
    if size <= 1:
        raise MemoryError(f"out of memory with a micro-batch of one sequence: {cause}")
    run.resize(size // 2)
    tell(run, Room(size // 2, run.room.gradient_checkpointing, cause), step=step)


def tell(run: Run, room: Room, *, step: int | None = None) -> None:
    """Write down that less fits than was thought; the next attempts begin with it."""
    run.room = replace(room, cause=None)
    event(
        run,
        "out_of_memory",
        step=step,
        cause=room.cause,
        micro_batch_size=room.micro_batch_size,
        gradient_checkpointing=room.gradient_checkpointing,
    )
