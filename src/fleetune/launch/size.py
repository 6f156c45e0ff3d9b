"""How many processes an attempt has, and on which devices: it shrinks when a device fails again and again, and is resized by
request.

A device is given up when the failures of two attempts in a row began on it, whatever they were, as long as more devices are
left than the run needs at least. Devices that the driver no longer counts are given up at once. A person's request brings
all of them back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from fleetune.launch.ending import Ending
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_json, write_json

#: So many attempts in a row must have failed on one device.
LOST_AFTER = 2

_REQUEST = "resize.json"


@dataclass(frozen=True)
class Resize:
    """A change of the number of processes, with its cause in one line."""

    before: int
    after: int
    cause: str


@final
class Size:
    """The devices of a run, by their number among those it was started with. at_least, at_most: as `--gpus MIN:MAX` says.

    count_devices: how many there are now; None for processes on a CPU, which have none to lose.
    """

    def __init__(self, num_processes: int, at_least: int, *, count_devices: Callable[[], int] | None = None) -> None:
        self.devices = tuple(range(num_processes))
        self.at_least = min(at_least, num_processes)
        self._asked_least = at_least
        self._count_devices = count_devices
        self._blamed: tuple[int, int] | None = None

    @property
    def num_processes(self) -> int:
        return len(self.devices)

    def after_failure(self, ending: Ending) -> Resize | None:
        """What a failure changes; None: the next attempt has the same processes."""
        present = None if self._count_devices is None else self._count_devices()
        if present is not None and present < self.num_processes:
            kept = tuple(device for device in self.devices if device < present)
            return self._shrink(kept, f"this machine has {present} devices left of {self.num_processes}")
        if ending.rank is None or ending.rank >= self.num_processes:
            self._blamed = None
            return None
        device = self.devices[ending.rank]
        times = self._blamed[1] + 1 if self._blamed is not None and self._blamed[0] == device else 1
        self._blamed = (device, times)
        if times < LOST_AFTER:
            return None
        kept = tuple(other for other in self.devices if other != device)
        return self._shrink(kept, f"the last {times} failures began on device {device} (rank {ending.rank})")

    def to(self, num_processes: int, cause: str) -> Resize | None:
        """Change to so many processes, because somebody asks for it: the devices in use first, then the others."""
        before = self.num_processes
        if num_processes == before:
            return None
        others = (device for device in range(num_processes + before) if device not in self.devices)
        pool = [*self.devices, *others]
        self.devices = tuple(sorted(pool[:num_processes]))
        # Back at the old size, it shrinks by itself no further than before.
        self.at_least = min(self._asked_least, num_processes)
        self._blamed = None
        return Resize(before, num_processes, cause)

    def _shrink(self, kept: tuple[int, ...], cause: str) -> Resize | None:
        if len(kept) < self.at_least or not kept:
            return None
        before, self.devices, self._blamed = self.num_processes, kept, None
        return Resize(before, len(kept), f"{cause}: going on without")


def ask_for(folder: RunFolder, num_processes: int) -> None:
    """Leave the request that the run goes on with so many processes; its supervisor takes it up within a second."""
    write_json(folder.path / _REQUEST, {"gpus": num_processes})


def take_request(folder: RunFolder) -> int | None:
    """The number of processes somebody has asked for since the last time, or None."""
    path = folder.path / _REQUEST
    if not path.exists():
        return None
    found = None
    with suppress(OSError, ValueError, KeyError, TypeError, UserError):
        found = int(read_json(path)["gpus"])
    path.unlink(missing_ok=True)
    return found if found is not None and found >= 1 else None
