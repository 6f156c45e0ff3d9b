"""What the nodes of a run saw of an attempt, on its way to the driver, and joined there into one verdict."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetune.launch.ending import Ending, Evidence, judge, last_step
from fleetune.launch.fleet import FleetNode
from fleetune.spec.records import Outcome
from fleetune.spec.run_folder import RunFolder

#: What must be the same in what every node's preparation found.
SAME = ("model_fingerprint", "data_fingerprint", "precision", "device", "num_sequences")


@dataclass(frozen=True)
class NodeEnding:
    """How an attempt ended on one node. hangs: a rank was found hanging there, and nothing else was wrong."""

    ending: Ending
    evidence: Evidence
    hangs: bool

    def to_row(self) -> dict[str, Any]:
        """As JSON, to be sent at once: its times are ages."""
        ending = {**dataclasses.asdict(self.ending), "log": None}
        return {"ending": ending, "evidence": evidence_row(self.evidence), "hangs": self.hangs}

    @staticmethod
    def of_row(row: Mapping[str, Any], num_processes: int) -> NodeEnding:
        return NodeEnding(Ending(**row["ending"]), evidence_of(row["evidence"], num_processes), row["hangs"])


def joined_ending(
    folder: RunFolder,
    attempt: int,
    nodes: Sequence[FleetNode],
    ended: Mapping[int, NodeEnding],
    lost: Mapping[int, str],
    *,
    asked_to_stop: bool,
) -> Ending:
    """What an attempt came to. ended: what each node saw of its own ranks. lost: why other nodes are gone.

    A lost node is the cause of what the others then saw; else all is judged as if it had been one machine.
    """
    wish = next((end.ending for end in ended.values() if end.ending.kind == "user"), None)
    if wish is not None:
        return wish
    by_number = {node.number: node for node in nodes}
    for number, why in lost.items():
        node = by_number[number]
        return Ending("crash", f"{node.name} is lost: {why}", node.first_rank, number, last_step(folder))
    for number, end in ended.items():
        if end.hangs:
            return dataclasses.replace(end.ending, node=number)
    num_processes = sum(node.num_processes for node in nodes)
    verdict = judge(merge([end.evidence for end in ended.values()], num_processes, asked_to_stop), folder, attempt)
    if verdict.kind != "crash" or verdict.rank is None:
        return verdict
    node = next(node for node in nodes if verdict.rank in node.ranks)
    own = ended[node.number].ending
    cause = own.cause if own.kind == "crash" and own.rank == verdict.rank else verdict.cause
    return dataclasses.replace(verdict, node=node.number, cause=cause)


def evidence_row(evidence: Evidence) -> dict[str, Any]:
    """Evidence as JSON. Times are sent as ages in seconds: two machines' clocks may differ."""
    now = time.time()
    return {
        "outcomes": [{**dataclasses.asdict(outcome), "age": now - at} for outcome, at in evidence.outcomes.values()],
        "deaths": {str(rank): now - at for rank, at in evidence.deaths.items()},
        "exit_codes": {str(rank): code for rank, code in evidence.exit_codes.items()},
        "killed": sorted(evidence.killed),
    }


def prepared_differences(prepared: list[tuple[FleetNode, Mapping[str, Any]]]) -> list[str]:
    """What the nodes' preparations found that must be the same and is not."""
    (first, mine), *others = prepared
    return [
        f"{name.replace('_', ' ')} is {mine[name]!r} on {first.host} and {theirs[name]!r} on {node.host}: give both the "
        "same model and the same data" + (", or name a --precision" if name == "precision" else "")
        for node, theirs in others
        for name in SAME
        if name in mine and name in theirs and mine[name] != theirs[name]
    ]


def evidence_of(row: Mapping[str, Any], num_processes: int) -> Evidence:
    """What a node sent, with its times on this machine's clock."""
    now = time.time()
    outcomes: dict[int, tuple[Outcome, float]] = {}
    for entry in row["outcomes"]:
        values = {name: value for name, value in entry.items() if name != "age"}
        outcomes[int(entry["rank"])] = (Outcome(**values), now - float(entry["age"]))
    return Evidence(
        num_processes=num_processes,
        outcomes=outcomes,
        deaths={int(rank): now - float(age) for rank, age in row["deaths"].items()},
        exit_codes={int(rank): int(code) for rank, code in row["exit_codes"].items()},
        killed=frozenset(int(rank) for rank in row["killed"]),
        asked_to_stop=False,
    )


def merge(parts: list[Evidence], num_processes: int, asked_to_stop: bool) -> Evidence:
    """The evidence of all nodes as that of one attempt: their ranks are different ones."""
    return Evidence(
        num_processes=num_processes,
        outcomes={rank: value for part in parts for rank, value in part.outcomes.items()},
        deaths={rank: value for part in parts for rank, value in part.deaths.items()},
        exit_codes={rank: value for part in parts for rank, value in part.exit_codes.items()},
        killed=frozenset(rank for part in parts for rank in part.killed),
        asked_to_stop=asked_to_stop,
    )
