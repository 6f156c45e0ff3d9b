"""One node of a run over several machines: `python -m fleetune.launch.node`, spoken to by the driver through its link.

It tells what this machine is, prepares, runs this node's ranks, and forwards what they write, where the run folder is not
shared. It decides nothing: the driver says when an attempt begins and what follows from its end. When the driver is gone, in
whatever way, the node's processes end.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from fleetune.launch.addresses import interface_of, is_own
from fleetune.launch.facts import disk_facts, machine_facts
from fleetune.launch.forward import Forwarder
from fleetune.launch.lease import Lease
from fleetune.launch.link import Link
from fleetune.launch.load import Load
from fleetune.launch.node_ranks import NodeRanks
from fleetune.launch.pairs import PairTests
from fleetune.launch.request import Commands, Launch, Patience
from fleetune.launch.stop import StopSignals
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_json

_POLL_S = 0.05


class Abandoned(BaseException):
    """The driver is gone, or wants this node's processes gone at once."""


def main() -> int:
    """Serve the driver to the end of the link."""
    link = Link(*_take_standard_streams())
    with StopSignals() as stop:
        node = Node(link, stop)
        try:
            node.serve()
        except Abandoned as reason:
            print(f"this node ends: {reason}", file=sys.stderr)
        finally:
            node.close()
    return 0


def _take_standard_streams() -> tuple[int, int]:
    """Our own ends of the link; what anybody prints goes to standard error from now on, and nobody waits for typing."""
    ends = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return ends


@final
class Node:
    """What the driver may ask of a machine. Each order is a row `{"do": name, ...}`; answers are rows too."""

    def __init__(self, link: Link, stop: StopSignals) -> None:
        self._link, self._stop = link, stop
        self._orders: deque[dict[str, Any]] = deque()
        self._folder: RunFolder | None = None
        self._lease: Lease | None = None
        self._forwarder: Forwarder | None = None
        self._ranks: NodeRanks | None = None
        self._attempt = 0
        self._load: Load | None = None
        self._number = 0
        self._made: list[Path] = []
        self._pairs = PairTests()

    def serve(self) -> None:
        """Obey until the link ends."""
        self._link.send({"hello": machine_facts()})
        actions = {
            "disks": self._disks,
            "sees": lambda order: self._link.send({"sees": Path(order["path"]).exists()}),
            "clock": lambda order: self._link.send({"clock": time.time(), "asked": order["asked"]}),
            "address": self._address,
            "listen": lambda order: self._link.send({"listening": self._pairs.listen(order["address"], order["token"])}),
            "measure": lambda order: self._link.send({"measured": self._pairs.measure(**order["to"])}),
            "silence": lambda order: self._pairs.close(),
            "probe": self._probe,
            "open": self._open,
            "prepare": self._prepare,
            "go": self._go,
            "again": self._again,
            "forget": self._forget,
        }
        while True:
            self.poll()
            if self._orders:
                order = self._orders.popleft()
                actions[order["do"]](order)
            else:
                time.sleep(_POLL_S)

    def poll(self) -> None:
        """What must happen whatever else is done: see whether the driver lives, hear a stop, send on what was written."""
        if self._link.is_lost:
            raise Abandoned(self._link.why_ended or f"nothing was heard of the driver for {self._link.silent_s:.0f} s")
        for row in self._link.take():
            if row.get("do") == "stop":
                self._stop.requested = self._stop.requested or "SIGTERM"
            elif row.get("do") == "kill":
                self._stop.requested, self._stop.insisted = self._stop.requested or "SIGTERM", True
            elif "do" in row:
                self._orders.append(row)
        if self._forwarder is not None:
            self._forwarder.forward()
        load = self._load.row() if self._load is not None else None
        if load is not None:
            self._link.send({"load": load})

    def close(self) -> None:
        """End everything that was started here."""
        if self._ranks is not None:
            self._ranks.close()
        if self._forwarder is not None and not self._link.is_lost:
            self._forwarder.forward(now=True)
        if self._lease is not None:
            self._lease.release()
        self._pairs.close()
        self._link.close()

    def _disks(self, order: Mapping[str, Any]) -> None:
        folders = [Path(order["folder"])]
        cache = os.environ.get("FLEETUNE_CACHE") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fleetune"
        )
        self._link.send({"disks": [disk_facts(folder) for folder in (*folders, Path(cache))]})

    def _address(self, order: Mapping[str, Any]) -> None:
        """Whether this machine has the address under which the others will look for it."""
        address = order["address"]
        self._link.send(
            {"address": address, "own": is_own(address), "interface": interface_of(address) if is_own(address) else None}
        )

    def _probe(self, order: Mapping[str, Any]) -> None:
        from fleetune.launch.probing import run_probe

        self._link.send({"probed": run_probe(order, poll=self.poll)})

    def _open(self, order: Mapping[str, Any]) -> None:
        """Make this node's run folder, or see that it is node 0's own."""
        folder = RunFolder(Path(order["folder"]))
        self._number = int(order["node"])
        is_shared = (folder.path / order["marker"]).exists()
        try:
            if not is_shared:
                self._made = [place for place in (folder.path, *folder.path.parents) if not place.exists()]
                if folder.exists() and not order["resume"]:
                    raise UserError(f"{folder.path} holds a run already: give --resume, or another --run")
                folder.create()
                self._lease = Lease.take(folder)
                folder.spec.write_text(order["run"], encoding="utf-8")
                folder.plan.write_text(order["plan"], encoding="utf-8")
                self._forwarder = Forwarder(folder, self._link)
        except UserError as error:
            self._link.send({"opened": False, "problems": list(error.problems)})
            return
        except OSError as error:
            self._link.send({"opened": False, "problems": [f"{error.filename or folder.path}: {error.strerror}"]})
            return
        self._folder, self._load = folder, Load(self._number)
        self._link.send({"opened": True, "shared": is_shared})

    def _prepare(self, order: Mapping[str, Any]) -> None:
        """Begin an attempt: the workers' imports and the preparation, at the same time."""
        assert self._folder is not None
        self._stop.requested, self._stop.insisted = None, False
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = NodeRanks(self._folder, self._launch(order), self._stop, self.poll, self._say)
        self._attempt = int(order["attempt"])
        code = self._ranks.prepare(self._attempt)
        if self._forwarder is not None:
            self._forwarder.forward(now=True)
        self._link.send({"prepared": code, "found": self._found()})

    def _launch(self, order: Mapping[str, Any]) -> Launch:
        """What runs here, from what the driver sent and what only this machine knows."""
        interface = interface_of(order["address"])
        bound = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        return Launch(
            num_processes=int(order["num_processes"]),
            node=self._number,
            num_nodes=int(order["num_nodes"]),
            device=order["device"],
            first_rank=int(order["first_rank"]),
            threads=order["threads"],
            environment={**order["environment"], **bound},
            prepare_arguments=(*order["prepare_arguments"], "--node", str(self._number)),
            commands=Commands(**{**order["commands"], "preload": tuple(order["commands"]["preload"])}),
            patience=Patience(**order["patience"]),
        )

    def _found(self) -> dict[str, Any]:
        """What the preparation found on this node; empty where it failed."""
        assert self._folder is not None
        try:
            return read_json(self._folder.prepared_on(self._number))
        except (OSError, ValueError):
            return {}

    def _again(self, order: Mapping[str, Any]) -> None:
        """Another attempt on what is prepared."""
        assert self._ranks is not None
        self._attempt = int(order["attempt"])
        self._ranks.ready()

    def _go(self, order: Mapping[str, Any]) -> None:
        assert self._ranks is not None
        ending = self._ranks.attempt(self._attempt, order["store"])
        if self._forwarder is not None:
            self._forwarder.forward(now=True)
        self._link.send({"ended": ending.to_row()})

    def _say(self, line: str) -> None:
        self._link.send({"say": line})

    def _forget(self, order: Mapping[str, Any]) -> None:
        """The start came to nothing: take back what was made here, as the driver does."""
        if self._folder is None or self._lease is None or not self._made:
            return
        import shutil

        self._lease.release()
        self._lease = self._forwarder = None
        shutil.rmtree(self._folder.path, ignore_errors=True)
        for place in self._made[1:]:
            try:
                place.rmdir()
            except OSError:
                break


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)
