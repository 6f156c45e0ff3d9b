"""The machines of a run, seen from the driver: reached, asked, and written to. The driver is on node 0."""

from __future__ import annotations

import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from fleetune.launch import addresses
from fleetune.launch.forward import receive
from fleetune.launch.local_site import LocalSite
from fleetune.launch.site import Connection, Site
from fleetune.launch.ssh_site import SshSite
from fleetune.spec.cluster_file import Cluster
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.run_folder import RunFolder, append_line

#: A machine that was reached and has not said what it is after so many seconds is told. (One that cannot be reached is told by
#: ssh, sooner.)
HELLO_S = 30.0
_POLL_S = 0.02


@final
@dataclass
class FleetNode:
    """One machine. address: under which the others reach it. facts: what it told of itself.

    num_processes, first_rank: its share of the ranks. answers: rows that nobody has waited for yet.
    """

    number: int
    host: str
    address: str
    site: Site
    log: Path
    connection: Connection
    facts: dict[str, Any] = field(default_factory=dict)
    num_processes: int = 1
    first_rank: int = 0
    answers: deque[dict[str, Any]] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.host})"

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_processes)

    @property
    def is_local(self) -> bool:
        return isinstance(self.site, LocalSite)

    def send(self, order: Mapping[str, Any]) -> None:
        self.connection.link.send(order)

    def take(self, key: str) -> dict[str, Any] | None:
        """The first answer that has this key, if it has come."""
        for row in self.answers:
            if key in row:
                self.answers.remove(row)
                return row
        return None


@final
class Fleet:
    """All machines of a run, connected. `close` ends their processes.

    folder: where files that nodes send are written; None: they are dropped. say: gets the lines that nodes say.
    """

    def __init__(self, cluster: Cluster, nodes: list[FleetNode], scratch: tempfile.TemporaryDirectory[str]) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.folder: RunFolder | None = None
        self.say: Callable[[FleetNode, str], None] = lambda node, line: None
        self._scratch = scratch

    @staticmethod
    def connect(cluster: Cluster, *, ssh_config: str | None, on: str, allow_public_address: bool = False) -> Fleet | None:
        """Reach all machines at once; None where the only one is this machine. Raises one UserError for all that fail."""
        places = locate_hosts(cluster, ssh_config=ssh_config, on=on, allow_public_address=allow_public_address)
        if len(places) == 1:
            return None
        scratch = tempfile.TemporaryDirectory(prefix="fleetune-nodes-")
        nodes = []
        for number, (host, address, site) in enumerate(places):
            log = Path(scratch.name) / f"node-{number}.log"
            nodes.append(FleetNode(number, host, address, site, log, site.reach(host, log)))
        fleet = Fleet(cluster, nodes, scratch)
        try:
            raise_if_any(fleet.greet(nodes))
        except BaseException:
            fleet.close()
            raise
        return fleet

    def greet(self, nodes: Sequence[FleetNode], *, poll: Callable[[], None] = lambda: None) -> list[str]:
        """Wait until these machines have said what they are; returns the problems of those that did not."""
        answers, problems = self.wait(nodes, "hello", HELLO_S, poll=poll)
        greeted = [node for node in nodes if node.number in answers]
        for node in greeted:
            node.facts = answers[node.number]["hello"]
            node.send({"do": "address", "address": node.address})
        answers, missing = self.wait(greeted, "own", HELLO_S, poll=poll)
        for node in greeted:
            if node.number in answers and not answers[node.number]["own"]:
                has = [address for entry in node.facts["interfaces"] for address in entry["addresses"]]
                missing.append(
                    f"host {node.host} has no interface with the address {node.address}, so the other machines cannot reach it "
                    f"there: name it by an address of its own ({', '.join(has)})"
                )
        return problems + missing

    def ask(
        self, order: Mapping[str, Any], key: str, seconds: float, *, nodes: Sequence[FleetNode] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Give all nodes (or some) an order, and wait for their answers. Raises UserError for those that do not come."""
        chosen = self.nodes if nodes is None else nodes
        for node in chosen:
            node.send(order)
        answers, problems = self.wait(chosen, key, seconds)
        raise_if_any(problems)
        return answers

    def tell(self, order: Mapping[str, Any]) -> None:
        """Give all nodes an order that has no answer."""
        for node in self.nodes:
            node.send(order)

    def pump(self) -> None:
        """Take what has come from all nodes: files are written, lines are said, the rest waits to be taken."""
        for node in self.nodes:
            for row in node.connection.link.take():
                if "file" in row:
                    if self.folder is not None:
                        receive(self.folder, row)
                elif "load" in row:
                    if self.folder is not None:
                        append_line(self.folder.load, row["load"])
                elif "say" in row:
                    self.say(node, str(row["say"]))
                else:
                    node.answers.append(row)

    def reconnect(self, node: FleetNode, *, poll: Callable[[], None]) -> str | None:
        """Reach a machine again that was lost; why it cannot be, or None."""
        node.connection.close()
        node.answers.clear()
        node.connection = node.site.reach(node.host, node.log)
        before = node.facts
        problems = self.greet([node], poll=poll)
        if problems:
            return problems[0]
        if (node.facts["code"], node.facts["packages"]) != (before["code"], before["packages"]):
            return f"host {node.host} has other software than before it was lost: install the same there"
        return None

    def close(self) -> None:
        for node in self.nodes:
            node.connection.link.close(seconds=0.2)  # all ends first: the nodes then end at the same time
        for node in self.nodes:
            node.connection.close()
        self._scratch.cleanup()

    def wait(
        self, nodes: Sequence[FleetNode], key: str, seconds: float, *, poll: Callable[[], None] = lambda: None
    ) -> tuple[dict[int, dict[str, Any]], list[str]]:
        """(answers with this key by the node's number, problems of the nodes without one)."""
        answers: dict[int, dict[str, Any]] = {}
        problems: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while len(answers) + len(problems) < len(nodes):
            poll()
            failures = {node.number: node.connection.failure() for node in nodes}  # first: what was said before the end counts
            self.pump()
            for node in nodes:
                if node.number in problems or node.number in answers:
                    continue
                row, failure = node.take(key), failures[node.number]
                if row is not None:
                    answers[node.number] = row
                elif failure is not None:
                    problems[node.number] = described(node, failure)
                elif time.monotonic() > deadline:
                    problems[node.number] = (
                        f"host {node.host} did not answer within {seconds:.0f} s: see whether it is overloaded"
                    )
            time.sleep(_POLL_S)
        return answers, list(problems.values())


def described(node: FleetNode, failure: str) -> str:
    """Why there is no connection, as a sentence about the host."""
    begins_with_verb = failure.startswith(("refuses ", "is not ", "has ", "does not ", "cannot ", "lacks "))
    return f"host {node.host} {failure}" if begins_with_verb else f"host {node.host}: {failure}"


def locate_hosts(
    cluster: Cluster, *, ssh_config: str | None, on: str, allow_public_address: bool
) -> list[tuple[str, str, Site]]:
    """(host, its address, how it is reached) of each machine. Raises one UserError with everything that is wrong."""
    found: list[tuple[str, str, Site]] = []
    problems: list[str] = []
    ssh: SshSite | None = None
    for host in cluster.hosts:
        name = host.rpartition("@")[2]
        try:
            address = resolve_quietly(name)
            if address is None or not addresses.is_own(address):
                ssh = ssh or SshSite(ssh_config)
                address = addresses.resolve(ssh.address_name(host))
        except UserError as error:
            problems += error.problems
            continue
        is_here = addresses.is_own(address)
        if not is_here and on == "local":
            problems.append(f"on local trains on this machine alone, and {host} ({cluster.origin}) is another: give --on ssh")
        if addresses.is_public(address) and not is_here and not allow_public_address:
            problems.append(
                f"host {host} has the address {address} of the public internet, and what machines say to each other is "
                "neither encrypted nor protected by a password: use a private network, or give --allow-public-address"
            )
        found.append((host, address, LocalSite() if is_here or ssh is None else ssh))
    raise_if_any(problems or _placement_problems(cluster, found))
    return _reachable_first(found)


def resolve_quietly(name: str) -> str | None:
    try:
        return addresses.resolve(name)
    except UserError:
        return None


def _placement_problems(cluster: Cluster, found: list[tuple[str, str, Site]]) -> list[str]:
    problems = []
    for number, (host, address, _) in enumerate(found):
        twin = next((other for other, same, _ in found[:number] if same == address), None)
        if twin is not None:
            problems.append(f"hosts {twin} and {host} ({cluster.origin}) are one machine ({address}): name each machine once")
    first, address, site = found[0]
    if not isinstance(site, LocalSite):
        problems.append(
            f"host {first} ({address}), the first of {cluster.origin}, is not this one ({socket.gethostname()}), and "
            "a run is led from its first machine: start fleetune there, or name this machine first (as master_addr)"
        )
    return problems


def _reachable_first(found: list[tuple[str, str, Site]]) -> list[tuple[str, str, Site]]:
    """The same, where this machine's own name stands for a loopback address (as Debian does it): the others need a real one."""
    others = [address for _, address, site in found if not isinstance(site, LocalSite)]
    if not others:
        return found
    real = []
    for host, address, site in found:
        if isinstance(site, LocalSite) and addresses.is_loopback(address):
            address = addresses.route_to(others[0]) or address
        real.append((host, address, site))
    return real
