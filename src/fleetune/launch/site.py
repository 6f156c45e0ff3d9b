"""How a node's process is started: the contract that this machine, ssh and every scheduler fulfil, each in its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from fleetune.launch.link import Link

#: What runs on every node; it is spoken to by its standard input and output.
NODE_MODULE = "fleetune.launch.node"


class Connection(Protocol):
    """A node's process, seen from the driver. It ends when its link does."""

    @property
    def link(self) -> Link: ...

    def failure(self) -> str | None:
        """Why there is no connection (any more), in plain words and with a fix where one is known; None while it stands."""

    def close(self) -> None:
        """End the line and whatever carries it. The node's process then ends everything that it has started."""


class Site(Protocol):
    """One way to start `fleetune.launch.node` on a machine."""

    def reach(self, host: str, log: Path) -> Connection:
        """Start the node's process on `host` and return at once. log: gets what is written to its standard error."""
