"""When the loop saves, and what becomes of each save. All ranks call everything here, and decide alike."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from fleetune.checkpoint.background import Saver
from fleetune.checkpoint.store import CheckpointStore
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_lines
from fleetune.training.progress import event

if TYPE_CHECKING:
    from fleetune.checkpoint.store import SaveReport
    from fleetune.parallel.held import Held
    from fleetune.parallel.world import World
    from fleetune.training.progress import Run
    from fleetune.training.spread import SpreadCheckpoints

#: What is assumed of a run that has seen nothing yet: one interruption a day, as of a laptop or a machine that is taken back.
ASSUMED_S_BETWEEN_FAILURES = 24 * 3600.0
#: At most this share of the time goes into saving, however often a run is interrupted.
MAX_SHARE = 0.02


def mean_time_between_failures(observed_s: float, num_failures: int) -> float:
    """Seconds, from what a run has seen; the assumption above counts as one day that was seen, with one failure in it."""
    return (ASSUMED_S_BETWEEN_FAILURES + observed_s) / (1 + num_failures)


def interval_s(cost_s: float, between_failures_s: float) -> float:
    """How many seconds to train from one save to the next when each costs `cost_s` of them.

    sqrt(2 * cost * mean time between failures): Young 1974 (doi 10.1145/361147.361115), the first order of Daly 2006 (doi
    10.1016/j.future.2004.11.016). What saving costs and what is expected to be done again are then equal.
    """
    return max(math.sqrt(2 * cost_s * between_failures_s), cost_s / MAX_SHARE)


#: Bytes a second that a first save is taken to write at, until one has been measured.
ASSUMED_BYTES_PER_S = 100e6
#: A copy that takes a larger share of the free memory is not made: the save blocks instead.
MAX_COPY_SHARE = 1 / 20


@dataclass
class Saves:
    """The saves of a run. between_failures_s: expected. cost_s: of one save, the largest rank's; an estimate until measured.

    costs_processor: whether writing takes processor time from training. begun: when the last save began, monotonic. is_late:
    a save was due while another was on its way.
    """

    saver: Saver
    between_failures_s: float
    cost_s: float
    costs_processor: bool
    begun: float = field(default_factory=time.monotonic)
    is_late: bool = False

    @property
    def since_s(self) -> float:
        """Seconds since the last save began, on this rank: the ranks must agree on one number before they use it."""
        return time.monotonic() - self.begun


def make_saves(store: CheckpointStore | SpreadCheckpoints, world: World, folder: RunFolder, *, mode: str, held: Held) -> Saves:
    """How a run saves. All ranks. mode: `auto`, `background` or `blocking`. held: what this rank holds."""
    import psutil

    copy_bytes = 4 * held.trained_here + held.optimizer_bytes
    free = psutil.virtual_memory().available / max(1, world.world_size // world.place.num_nodes)
    too_large = world.max([float(copy_bytes > MAX_COPY_SHARE * free)])[0] > 0
    is_shared = isinstance(store, CheckpointStore)  # else pieces travel between machines, in the loop's own turns
    if mode == "background" and not is_shared:
        raise UserError("save_mode background needs a run folder that all machines share: leave it out, or share the folder")
    in_background = is_shared and (mode == "background" or (mode == "auto" and not too_large))
    rows = list(read_lines(folder.events)) if world.rank == 0 else []
    times = [row["time"] for row in rows if isinstance(row.get("time"), (int, float))]
    seen = [max(times, default=0.0) - min(times, default=0.0), sum(row.get("event") == "failure" for row in rows)]
    observed_s, num_failures = world.broadcast_json(seen)
    return Saves(
        Saver(store, in_background=in_background),
        between_failures_s=mean_time_between_failures(observed_s, int(num_failures)),
        cost_s=copy_bytes / ASSUMED_BYTES_PER_S,
        costs_processor=world.device.type == "cpu",
    )


def is_due(run: Run, since_s: float) -> bool:
    """Whether a save is due after this step. since_s: seconds since the last one, the same on all ranks."""
    if run.saves.is_late:
        return True
    every = run.cadence.checkpoint_every
    if every is None:
        return since_s >= interval_s(run.saves.cost_s, run.saves.between_failures_s)
    return every > 0 and run.progress.step % every == 0


def may_begin(run: Run) -> bool:
    """Whether a save that may come later can begin now. While another is on its way it is put off, and that is told once."""
    saves = run.saves
    if not saves.saver.in_flight:
        return True
    if not saves.is_late:
        saves.is_late = True
        event(run, "save_late", step=run.progress.step, cause="the save before is still being written: this one comes after it")
    return False


def settle(run: Run) -> None:
    """Take in the save in flight, waiting for it where it must, and tell how it went. All ranks, in the same step."""
    report = run.saves.saver.take()
    if report is not None:
        _tell(run, report, in_background=True)


def save(run: Run, *, wait: bool = True) -> None:
    """Save a complete checkpoint of this step. A failed save is told and training goes on: the older checkpoint stands.

    wait: return when it is on the disk. Else only when everything is copied, and `settle` tells how it went.
    """
    run.pulse.at("save")
    settle(run)
    saves, progress = run.saves, run.progress
    if run.monitor is not None:
        run.monitor.flush_sinks()
        saves.saver.first = run.monitor.sync
    saves.begun, saves.is_late = time.monotonic(), False
    best = progress.best_step is not None and progress.best_step == progress.step
    report = saves.saver.begin(progress.step, run.engine.shards(), asdict(progress), best=best)
    if report is not None:
        _tell(run, report, in_background=False)
    elif wait:
        settle(run)
    run.pulse.at("data")


def _tell(run: Run, report: SaveReport, *, in_background: bool) -> None:
    progress, saves = run.progress, run.saves
    progress.save_stall_s += report.stall_s
    cost_s = report.stall_s + (report.cpu_s if saves.costs_processor else 0.0)
    saves.cost_s = run.world.max([cost_s])[0]
    if report.error:
        event(run, "save_failed", step=report.step, cause=report.error, stall_s=report.stall_s)
        return
    if not report.unchanged:
        progress.num_saves += 1
    event(
        run,
        "save",
        step=report.step,
        bytes=report.bytes,
        seconds=report.seconds,
        stall_s=report.stall_s,
        in_background=in_background,
        best=progress.best_step == report.step,
    )
