"""The workers of one attempt, and what starts them: one process directly, several through torch elastic's agent."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from fleetune.launch.child import Call
from fleetune.launch.identity import Identity, wait_until_dead
from fleetune.launch.liveness import AGENT, Hang, Liveness
from fleetune.launch.nursery import Forked, Nursery
from fleetune.launch.processes import Process, Reports, Surroundings
from fleetune.launch.pulse import STACKS_SIGNAL
from fleetune.launch.request import Commands
from fleetune.launch.stacks import sizes_of, waiting_ranks
from fleetune.spec.run_folder import RunFolder

#: So long a hanging process gets to write its stacks.
_STACKS_S = 1.0


@final
class Team:
    """The processes of one attempt, from their fork to their end.

    ranks: those of this machine. starter: the worker itself (is_solo), or the agent. members: the workers known so far, by
    rank; the agent's announce themselves. killed: ranks that were alive when `kill` was called. exit_codes: as far as they
    are known (negative: by that signal).
    first_death: when the first rank was found dead (monotonic), and seconds since it was last seen alive.
    """

    def __init__(self, starter: Forked, nursery: Nursery, ranks: range, reports: Reports, liveness: Liveness) -> None:
        self.starter = starter
        self.ranks = ranks
        self.num_processes = len(ranks)
        self.members: dict[int, Identity] = {}
        self.deaths: dict[int, float] = {}
        self.killed: set[int] = set()
        self.exit_codes: dict[int, int] = {}
        self.is_solo = False
        self.liveness = liveness
        self.first_death: tuple[float, float] | None = None
        self._nursery, self._reports = nursery, reports
        self._looked_at = time.monotonic()

    @property
    def is_complete(self) -> bool:
        """Whether every rank has a process (dead or alive)."""
        return len(self.members) == self.num_processes

    @property
    def is_over(self) -> bool:
        return self.starter.is_over

    def look(self) -> None:
        """See who has come and who has died since the last look, and what the living say of themselves."""
        now = time.monotonic()
        self.liveness.pass_time(now)
        self._nursery.look()
        for row in self._reports.take():
            self._hear(row)
        for rank, member in self.members.items():
            if rank not in self.deaths and not member.lives:
                self.deaths[rank] = time.time()
                self.first_death = self.first_death or (now, now - self._looked_at)
        if self.is_solo and self.starter.pid is not None:
            if 0 not in self.members:
                self.members[0] = Identity.of(self.starter.pid)
                self.liveness.expect(0)
            if self.starter.exit_code is not None:
                self.exit_codes[0] = self.starter.exit_code
        self.liveness.saw_end(self.deaths)
        self._looked_at = now

    def ask_to_stop(self) -> None:
        """SIGTERM to every worker that lives: it saves and ends with 75."""
        for member in self.members.values():
            member.send(signal.SIGTERM)

    def kill(self) -> None:
        """End every process of the attempt, now."""
        self.killed.update(rank for rank, member in self.members.items() if member.lives)
        self.starter.kill()
        for member in self.members.values():
            member.send(signal.SIGKILL)

    def close(self) -> list[int]:
        """Make sure that nothing is left of the attempt. Returns processes that even SIGKILL has not ended yet."""
        self.look()
        self.kill()
        left = [member.pid for member in wait_until_dead(list(self.members.values()), 5.0)]
        if not self.starter.wait(5.0) and self.starter.pid is not None:
            left.append(self.starter.pid)
        self.look()
        self._reports.close()
        return left

    def who_hangs(self, hangs: list[Hang], logs: Mapping[int, Path]) -> Hang:
        """Of ranks that make no progress, the one that the others wait for. All are asked for their stacks, in their logs."""
        silent = [hang for hang in hangs if hang.silent]
        before = sizes_of(logs)
        living = [rank for rank, member in self.members.items() if member.lives]
        if STACKS_SIGNAL is not None:
            for rank in living:
                self.members[rank].send(STACKS_SIGNAL)
        deadline = time.monotonic() + _STACKS_S
        waiting: set[int] = set()
        while time.monotonic() < deadline and len(waiting) + 1 < len(living):
            time.sleep(0.05)
            waiting = waiting_ranks(logs, before, living)
        if silent:
            return silent[0]
        return next((hang for hang in hangs if hang.rank not in waiting), hangs[0])

    def _hear(self, row: Mapping[str, Any]) -> None:
        if "pulse" in row:
            figures = {name: int(row.get(name, 0)) for name in ("marks", "done")}
            self.liveness.saw(int(row["pulse"]), str(row.get("phase", "")), int(row.get("step", 0)), **figures)
        elif "started" in row:
            self.members[int(row["started"])] = Identity.of(int(row["pid"]))
            self.liveness.expect(int(row["started"]))
            if self.is_complete:
                self.liveness.expect(AGENT, "watch")  # it has nothing left to do but to look at them
        elif "ended" in row:
            self.exit_codes.update({int(rank): int(code) for rank, code in row["ended"].items()})


@dataclass(frozen=True)
class CrewPlace:
    """Which ranks an agent starts: those of the machine `node` of `num_nodes`."""

    ranks: range
    node: int = 0
    num_nodes: int = 1

    def words(self) -> tuple[str, ...]:
        return ("--num-processes", str(len(self.ranks)), "--node", str(self.node), "--num-nodes", str(self.num_nodes))


@final
class Store:
    """The store in which ranks find each other: a process of its own, so that no rank and no agent is special."""

    def __init__(
        self, commands: Commands, folder: RunFolder, surroundings: Surroundings, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._reports = Reports()
        call = Call(commands.store, ("--host", host, "--port", str(port)))
        self.process = Process(call, folder.logs / "store.log", surroundings, reports=self._reports)
        self._reports.started()
        self._endpoint: str | None = None

    @property
    def endpoint(self) -> str | None:
        """`host:port`, None while it is not known yet."""
        for row in self._reports.take():
            self._endpoint = f"{row['host']}:{row['port']}"
        return self._endpoint

    def close(self) -> None:
        self.process.kill()
        self.process.wait(5.0)
        self._reports.close()


def start_solo(
    nursery: Nursery,
    commands: Commands,
    folder: RunFolder,
    attempt: int,
    liveness: Liveness,
    *,
    variables: Mapping[str, str],
) -> Team:
    """One process: the worker itself."""
    reports = Reports()
    call = Call(commands.worker, (str(folder.path), "--attempt", str(attempt)))
    starter = nursery.start(call, folder.log(0, attempt), variables={**solo_variables(), **variables}, reports=reports)
    reports.started()
    team = Team(starter, nursery, range(1), reports, liveness)
    team.is_solo = True
    return team


def solo_variables() -> Mapping[str, str]:
    """What torch elastic's agent would tell the only process of a run."""
    zero, one = ("RANK", "LOCAL_RANK", "GROUP_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    return {**dict.fromkeys(zero, "0"), **dict.fromkeys(one, "1")}


def start_crew(
    nursery: Nursery,
    commands: Commands,
    folder: RunFolder,
    attempt: int,
    liveness: Liveness,
    *,
    place: CrewPlace,
    store: str,
    variables: Mapping[str, str],
) -> Team:
    """Several processes, or those of one of several machines: the agent, which forks them. store: `host:port`."""
    reports = Reports()
    arguments = (str(folder.path), "--attempt", str(attempt), *place.words())
    call = Call(commands.agent, (*arguments, "--worker", commands.worker, "--store", store), single_threaded=True)
    log = folder.node_log("agent", place.node, attempt)
    starter = nursery.start(call, log, variables=variables, reports=reports)
    reports.started()
    return Team(starter, nursery, place.ranks, reports, liveness)
