"""A rank on every machine that meets the others as training would: who cannot be met is named."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetune.launch.checks import Finding, speed
from fleetune.launch.fleet import Fleet
from fleetune.launch.fleet_store import FleetStore
from fleetune.launch.lifeline import Lifeline
from fleetune.launch.processes import Surroundings
from fleetune.launch.request import Launch, environment_of
from fleetune.spec.run_folder import RunFolder

#: Until the test of a node is given up, in seconds, and what its answer may take beyond that.
_TEST_S, _MORE_S = 45.0, 10.0


@dataclass
class Meeting:
    """What came of it. pairs: `a and b` -> why the two could not. seconds, num_bytes: of one sum over all machines."""

    backend: str = "gloo"
    seconds: float | None = None
    num_bytes: int = 0
    pairs: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def findings(self) -> list[Finding]:
        fix = "Open all ports between the machines; see that each is named by an address of the same network"
        found = [Finding("error", pair, f"the two cannot sum numbers: {why}", fix) for pair, why in self.pairs.items()]
        return found + [
            Finding("error", host, f"its part of the sum failed: {why}", fix) for host, why in self.problems.items()
        ]

    def line(self) -> str:
        assert self.seconds is not None
        rate = speed(self.num_bytes / self.seconds)
        return f"sum over all machines ({self.backend}): {self.num_bytes >> 20} MiB in {1000 * self.seconds:.1f} ms ({rate})"

    def to_json(self) -> dict[str, Any]:
        return {"backend": self.backend, "seconds": self.seconds, "bytes": self.num_bytes, "pairs": self.pairs}


def meet(fleet: Fleet, device: str) -> Meeting:
    """Let one rank of every node sum numbers with each other one, then all together. Takes a few seconds: torch is imported."""
    found = Meeting()
    launch = Launch()
    lifeline = Lifeline()
    with tempfile.TemporaryDirectory(prefix="fleetune-store-") as scratch:
        folder = RunFolder(Path(scratch))
        surroundings = Surroundings(environment_of(launch)[0], lifeline)
        address = fleet.nodes[0].address
        store = FleetStore(launch.commands, folder, surroundings, address=address, port=fleet.cluster.port)
        try:
            store.start()
            endpoint = store.endpoint(fleet.pump, lambda: False)
            if endpoint is None:
                found.problems[fleet.nodes[0].host] = store.failure()
                return found
            _ask(fleet, endpoint, device, found)
        finally:
            store.close()
            lifeline.close()
    return found


def _ask(fleet: Fleet, endpoint: str, device: str, found: Meeting) -> None:
    hosts = {node.number: node.host for node in fleet.nodes}
    order = {"do": "probe", "store": endpoint, "num_nodes": len(hosts), "device": device, "seconds": _TEST_S}
    for node in fleet.nodes:
        node.send({**order, "node": node.number, "address": node.address})
    answers, problems = fleet.wait(fleet.nodes, "probed", _TEST_S + _MORE_S)
    for node in fleet.nodes:
        if node.number not in answers:
            found.problems[node.host] = next((text for text in problems if node.host in text), "it did not answer")
    for number, answer in answers.items():
        row = answer["probed"]
        for pair, why in row.get("pairs", {}).items():
            first, second = (hosts[int(part)] for part in pair.split("-"))
            found.pairs.setdefault(f"{first} and {second}", why)
        if "error" in row:
            found.problems[hosts[number]] = row["error"]
        elif "all_reduce_s" in row:
            found.seconds = max(found.seconds or 0.0, float(row["all_reduce_s"]))
            found.num_bytes, found.backend = int(row["all_reduce_bytes"]), str(row["backend"])
    if found.pairs:
        found.problems.clear()  # they only follow from it
