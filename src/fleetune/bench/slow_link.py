"""Processes of one machine that see each other only through a link of a given speed: network namespaces, root needed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fleetune.spec.errors import UserError

_INTERFACE = "link0"
#: What may leave at once before the rate counts: as many seconds of the link, and no fewer bytes than some packets have.
_BURST_S = 0.002
_MIN_BURST_BYTES = 16_000


@dataclass(frozen=True)
class Place:
    """Where one process stands: the words in front of its command, its address, and the interface that has it."""

    words: tuple[str, ...]
    address: str
    interface: str


@contextmanager
def slow_link(count: int, mbit: int) -> Iterator[list[Place]]:
    """`count` places with one cable each into one switch, `mbit` Mbit/s in each direction. Raises UserError where the system
    does not allow it."""
    mark = f"fb{os.getpid() % 100000}"
    names = [f"{mark}-{number}" for number in range(count)]
    burst = max(_MIN_BURST_BYTES, int(mbit * 1e6 / 8 * _BURST_S))
    try:
        _do("ip", "link", "add", mark, "type", "bridge")
        _do("ip", "link", "set", mark, "up")
        for number, name in enumerate(names):
            _do("ip", "netns", "add", name)
            _do("ip", "link", "add", name, "type", "veth", "peer", "name", _INTERFACE, "netns", name)
            _do("ip", "link", "set", name, "master", mark, "up")
            _do("ip", "-n", name, "addr", "add", f"10.213.77.{number + 1}/24", "dev", _INTERFACE)
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _do("ip", "-n", name, "link", "set", _INTERFACE, "up")
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "50ms")
            _do("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", *limit)
        yield [Place(("ip", "netns", "exec", name), f"10.213.77.{number + 1}", _INTERFACE) for number, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", mark], capture_output=True, check=False)


def _do(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"a slow link is made with {words[0]}, which cannot be run ({error}): leave out --link-mbit") from None
    if done.returncode:
        raise UserError(
            f"a slow link cannot be made here (`{' '.join(words)}`: {done.stderr.strip()}): it needs root and network "
            "namespaces; leave out --link-mbit"
        )


def environment(places: Sequence[Place], rank: int, port: int) -> dict[str, str]:
    """What torchrun would tell the only process of the node `rank`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": places[rank].interface,
    }
