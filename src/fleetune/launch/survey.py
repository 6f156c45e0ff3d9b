"""Can these machines train together? The questions that are asked of all of them, and what the answers mean."""

from __future__ import annotations

import itertools
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetune.launch import checks
from fleetune.launch.checks import Finding
from fleetune.launch.fleet import Fleet, FleetNode
from fleetune.launch.meeting import Meeting
from fleetune.launch.pairs import port_problem

_ANSWER_S = 30.0


@dataclass
class Survey:
    """findings: what is wrong or good to know. machines: facts by host. pairs: measured ways, `a to b` -> figures.

    meeting: what came of a sum over all machines, where one was made.
    """

    findings: list[Finding] = field(default_factory=list)
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    pairs: dict[str, dict[str, Any]] = field(default_factory=dict)
    meeting: Meeting | None = None

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]


def survey_fleet(fleet: Fleet, folder: Path) -> Survey:
    """The questions that need no torch: equal software, clocks, disks, and every way between two machines. A second or two.

    folder: where the run will live.
    """
    found = Survey(machines={node.host: node.facts for node in fleet.nodes})
    found.findings += checks.check_equality([(node.host, node.facts) for node in fleet.nodes])
    for node in fleet.nodes:
        found.findings += checks.check_machine(node.host, node.facts)
    disks = fleet.ask({"do": "disks", "folder": str(folder)}, "disks", _ANSWER_S)
    for node in fleet.nodes:
        node.facts["disks"] = disks[node.number]["disks"]
        found.findings += checks.check_disks(node.host, node.facts["disks"])
    _shared(fleet, folder, found)
    _clocks(fleet, found)
    port = fleet.cluster.port
    problem = port_problem(fleet.nodes[0].address, port) if port is not None else None
    if problem is not None:
        text = f"port {port} ({fleet.cluster.origin}) cannot be used on {fleet.nodes[0].address}: {problem}"
        found.findings.append(
            Finding("error", fleet.nodes[0].host, text, "Name another master_port, or end what listens there")
        )
    _pairs(fleet, found)
    return found


def rounds_of(fleet: Fleet) -> Iterator[tuple[FleetNode, FleetNode]]:
    """Every pair of nodes, one after the other, so that none disturbs the measurement of another."""
    yield from itertools.combinations(fleet.nodes, 2)


def _shared(fleet: Fleet, folder: Path, found: Survey) -> None:
    """Whether all see one file system where the run will live: by a file that is there for a moment."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(prefix=".fleetune-", dir=place) as mark:
            answers = fleet.ask({"do": "sees", "path": mark.name}, "sees", _ANSWER_S)
    except OSError:
        return  # that it cannot be written to is told with the disks
    found.findings.append(checks.check_shared(str(folder), [(node.host, answers[node.number]["sees"]) for node in fleet.nodes]))


def _clocks(fleet: Fleet, found: Survey) -> None:
    for node in fleet.nodes:
        began = time.time()
        answer = fleet.ask({"do": "clock", "asked": began}, "clock", _ANSWER_S, nodes=[node])[node.number]
        skew = float(answer["clock"]) - (began + time.time()) / 2
        node.facts["clock_skew_s"] = round(skew, 3)
        found.findings += checks.check_clock(node.host, skew)


def _pairs(fleet: Fleet, found: Survey) -> None:
    token = secrets.token_hex(32)
    ports: dict[int, int] = {}
    for node in fleet.nodes:
        order = {"do": "listen", "address": node.address, "token": token}
        answer = fleet.ask(order, "listening", _ANSWER_S, nodes=[node])[node.number]["listening"]
        if "error" in answer:
            found.findings.append(Finding("error", node.host, answer["error"], "Name another address of this machine"))
        else:
            ports[node.number] = answer["port"]
    for first, second in rounds_of(fleet):
        for here, there in ((first, second), (second, first)):
            if there.number not in ports:
                continue
            name = there.host.rpartition("@")[2]
            to = {"name": name, "address": there.address, "port": ports[there.number], "token": token, "own": here.address}
            answer = fleet.ask({"do": "measure", "to": to}, "measured", _ANSWER_S, nodes=[here])[here.number]["measured"]
            found.pairs[f"{here.host} to {there.host}"] = answer
            found.findings += checks.check_pair(here.host, there.host, answer)
    for node in fleet.nodes:
        node.send({"do": "silence"})
