"""A real worker that breaks at a chosen place. FAULTS is a JSON list of

    {"kind": "flip", "rank": 1, "step": 7}       after its 7th step, one bit of a weight is the other way round, once
    {"kind": "slow_disk", "seconds": 9, "from_step": 4}             once, creating a file of a checkpoint takes so long
    {"kind": "failing_disk", "from_step": 4, "before_step": 7}      no file of a checkpoint can be created
    {"kind": "fill_disk", "folder": F, "from_step": 3, "before_step": 8}     no room is left on the disk of F
    {"kind": "no_memory", "rank": 1, "sequences": 1}     a micro-batch of more sequences (`tokens`) than that raises MemoryError
    {"kind": "eat_memory", "rank": 1, "sequences": 1}    a micro-batch of more sequences takes memory until the kernel kills

step counts the engine's steps in this process, from 1; rank is the one it happens on, else all.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetune.checkpoint import store
from fleetune.parallel import engines, native
from fleetune.training import worker


def main(arguments: list[str]) -> int:
    rank = int(os.environ.get("RANK", "0"))
    for fault in json.loads(os.environ["FAULTS"]):
        if fault.get("rank", rank) == rank:
            KINDS[fault["kind"]](fault)
    return worker.main(arguments)


def flip(fault: dict[str, Any]) -> None:
    """A bit of the first trained tensor, in the middle of its mantissa: the weight stays a plausible number."""

    def after(engine: Any, count: int) -> None:
        if count == fault["step"]:
            _, tensor = next(engine.full_tensors())
            bits = tensor.view(-1).numpy().view("uint32")  # on a CPU these are the weights themselves
            bits[3] ^= 1 << 12

    on_steps(after=after)


def on_steps(
    before: Callable[[Any, int], None] = lambda engine, count: None,
    after: Callable[[Any, int], None] = lambda engine, count: None,
) -> None:
    """Call `before` and `after` around each step of the engine, with it and the number of the step in this process."""
    build_engine = engines.build_engine

    def built(*arguments: Any) -> Any:
        made = build_engine(*arguments)
        engine = made.engine
        step, count = engine.step, 0

        def counted(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            before(engine, count)
            report = step(*arguments)
            after(engine, count)
            return report

        engine.step = counted
        return made

    engines.build_engine = built


class Steps:
    """How many steps this process has made."""

    def __init__(self) -> None:
        self.made = 0
        on_steps(after=self._count)

    def _count(self, engine: Any, count: int) -> None:
        self.made = count


def on_create(before: Callable[[], None]) -> None:
    """Call `before` whenever a file of a checkpoint is created."""

    class Disk(store.RealDisk):
        def create(self, path: Path) -> Any:
            before()
            return super().create(path)

    store.RealDisk = Disk


def slow_disk(fault: dict[str, Any]) -> None:
    steps, is_slow = Steps(), True

    def wait() -> None:
        nonlocal is_slow
        if is_slow and steps.made >= fault["from_step"]:
            is_slow = False
            time.sleep(fault["seconds"])

    on_create(wait)


def failing_disk(fault: dict[str, Any]) -> None:
    steps = Steps()

    def fail() -> None:
        if fault["from_step"] <= steps.made < fault["before_step"]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    on_create(fail)


def fill_disk(fault: dict[str, Any]) -> None:
    filler = Path(fault["folder"]) / "filler"

    def around(engine: Any, count: int) -> None:
        if count == fault["from_step"]:
            free = shutil.disk_usage(filler.parent).free
            filler.write_bytes(bytes(free))
        elif count == fault["before_step"]:
            for thread in threading.enumerate():
                if thread.name == "save":
                    thread.join(60)  # a save on its way meets the full disk, however slow the machine
            filler.unlink()

    on_steps(before=around)


def on_forward(before: Callable[[Any], None]) -> None:
    """Call `before` with each micro-batch that is trained or evaluated."""
    forward_of = native.forward_of

    def wrapped(model: Any, objective: Any) -> Any:
        forward = forward_of(model, objective)

        def checked(batch: Any) -> Any:
            before(batch)
            return forward(batch)

        return checked

    native.forward_of = wrapped


def no_memory(fault: dict[str, Any]) -> None:
    def before(batch: Any) -> None:
        if len(batch.sequences) > fault.get("sequences", math.inf) or batch.num_tokens > fault.get("tokens", math.inf):
            raise MemoryError(f"no room for {len(batch.sequences)} sequences of {batch.num_tokens} tokens")

    on_forward(before)


def eat_memory(fault: dict[str, Any]) -> None:
    eaten = []

    def before(batch: Any) -> None:
        while len(batch.sequences) > fault["sequences"]:
            eaten.append(b"\1" * (32 << 20))  # written to, so that the kernel must give it

    on_forward(before)


KINDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "flip": flip,
    "slow_disk": slow_disk,
    "failing_disk": failing_disk,
    "fill_disk": fill_disk,
    "no_memory": no_memory,
    "eat_memory": eat_memory,
}
