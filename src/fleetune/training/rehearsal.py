"""Before the first step of a run that adapts its micro-batch to memory: the worst case is tried, and larger ones where none was
given. It trains nothing: what is rehearsed is a forward and a backward whose gradients are dropped, and a save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetune.launch.facts import memory_facts
from fleetune.monitor.memory import PeakMemory, current_memory
from fleetune.parallel.out_of_memory import OutOfMemory
from fleetune.training.progress import event
from fleetune.training.room import REHEARSAL, take_smaller
from fleetune.training.saving import save

if TYPE_CHECKING:
    import numpy as np

    from fleetune.training.build import Parts

#: Of the memory that is free, what a larger micro-batch may be expected to take where going too far means the kernel's kill.
_MAX_SHARE = 0.5
#: Seconds between two looks at this process's memory meanwhile.
_LOOK_S = 0.002


def rehearse(parts: Parts) -> None:
    """Find the micro-batch size of a run, before its first step. All ranks.

    The heaviest micro-batch of the data is tried; where it does not fit on some rank, half of it, down to one sequence (then
    MemoryError: the next attempt has more to try). Where a larger one may be tried, doubled sizes are, as long as every data
    rank has a micro-batch in a step. At the end comes a save: its copies need memory too.
    Each try is told before it is made, so that an attempt that dies of it leaves word.
    """
    run = parts.run
    order = parts.store.heaviest_first()
    before = current_memory()
    while True:
        size = parts.batches.micro_batch_size
        event(run, REHEARSAL, micro_batch_size=size)
        run.pulse.tick()
        try:
            need = try_once(parts, order[:size], before)
        except OutOfMemory as short:
            take_smaller(run, run.progress.step + 1, str(short))
            continue
        if need is None or not run.room.may_grow or not may_double(parts, need):
            break
        parts.resize(2 * size)
    save(run, wait=False)
    run.pulse.at("load")


def try_once(parts: Parts, sequences: np.ndarray, before: int) -> int | None:
    """Run one micro-batch of these sequences on every rank; returns the bytes that this process took beside `before`, None
    where the engine cannot rehearse. Raises OutOfMemory on all ranks."""
    run = parts.run
    batch = parts.store.micro_batch(step=run.progress.step, number=0, sequences=sequences)
    peak = PeakMemory(interval_s=_LOOK_S)
    try:
        if not run.engine.rehearse((batch,)):
            return None
        return max(0, peak() - before)
    finally:
        peak.close()


def may_double(parts: Parts, need: int) -> bool:
    """Whether a micro-batch of twice the size is worth a try, on every rank. need: bytes that the present one took.

    On a GPU a try that fails is undone. On a CPU it would be the kernel that ends it, so it must be expected to fit.
    """
    world, batches = parts.run.world, parts.batches
    size = 2 * batches.micro_batch_size
    if batches.global_batch_size % size or batches.global_batch_size // size < world.data_ranks:
        return False
    if size > parts.store.num_sequences:
        return False
    if world.device.type != "cpu":
        return True
    # What the present size took is still this process's own: only as much again must be free.
    free = memory_facts()["available_bytes"] / max(1, world.world_size // world.place.num_nodes)
    return world.max([float(need > _MAX_SHARE * free)])[0] == 0
