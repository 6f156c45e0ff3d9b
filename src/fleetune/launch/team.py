"""The workers of one attempt, and what starts them: one process directly, several through torch elastic's agent."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import final

from fleetune.launch.child import Call
from fleetune.launch.identity import Identity, wait_until_dead
from fleetune.launch.processes import Process, Reports, Surroundings
from fleetune.launch.request import Commands
from fleetune.spec.run_folder import RunFolder


@final
class Team:
    """The processes of one attempt, from their imports to their end.

    starter: the worker itself, or the agent. members: the workers known so far, by rank; the agent's announce themselves.
    killed: ranks that were alive when `kill` was called. exit_codes: as far as they are known (negative: by that signal).
    """

    def __init__(self, starter: Process, num_processes: int, reports: Reports | None) -> None:
        self.starter = starter
        self.num_processes = num_processes
        self.members: dict[int, Identity] = {}
        self.deaths: dict[int, float] = {}
        self.killed: set[int] = set()
        self.exit_codes: dict[int, int] = {}
        self._reports = reports
        if reports is None:
            self.members[0] = Identity.of(starter.pid)

    @property
    def is_complete(self) -> bool:
        """Whether every rank has a process (dead or alive)."""
        return len(self.members) == self.num_processes

    @property
    def is_over(self) -> bool:
        return self.starter.exit_code is not None

    def look(self) -> None:
        """See who has come and who has died since the last look."""
        for row in self._reports.take() if self._reports is not None else ():
            if "started" in row:
                self.members[int(row["started"])] = Identity.of(int(row["pid"]))
            elif "ended" in row:
                self.exit_codes.update({int(rank): int(code) for rank, code in row["ended"].items()})
        for rank, member in self.members.items():
            if rank not in self.deaths and not member.lives:
                self.deaths[rank] = time.time()
        if self._reports is None and self.starter.exit_code is not None:
            self.exit_codes[0] = self.starter.exit_code

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
        if not self.starter.wait(5.0):
            left.append(self.starter.pid)
        self.look()
        if self._reports is not None:
            self._reports.close()
        return left


@final
class Store:
    """The store in which ranks find each other: a process of its own, so that no rank and no agent is special."""

    def __init__(self, commands: Commands, folder: RunFolder, surroundings: Surroundings) -> None:
        self._reports = Reports()
        call = Call(commands.store, ("--host", "127.0.0.1"))
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


def start_solo(commands: Commands, folder: RunFolder, attempt: int, surroundings: Surroundings) -> Team:
    """One process: the worker itself. It imports, and waits for `go`."""
    call = Call(commands.worker, (str(folder.path), "--attempt", str(attempt)), commands.preload, waits=True)
    return Team(Process(call, folder.log(0, attempt), surroundings, variables=solo_variables()), 1, None)


def solo_variables() -> Mapping[str, str]:
    """What torch elastic's agent would tell the only process of a run."""
    zero, one = ("RANK", "LOCAL_RANK", "GROUP_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    return {**dict.fromkeys(zero, "0"), **dict.fromkeys(one, "1")}


def start_crew(commands: Commands, folder: RunFolder, attempt: int, surroundings: Surroundings, num_processes: int) -> Team:
    """Several processes: the agent, which imports once, waits for `go --store HOST:PORT`, and forks the workers."""
    reports = Reports()
    arguments = (str(folder.path), "--attempt", str(attempt), "--num-processes", str(num_processes))
    call = Call(
        commands.agent,
        (*arguments, "--worker", commands.worker),
        (commands.agent, *commands.preload),
        waits=True,
        single_threaded=True,
    )
    starter = Process(call, folder.logs / f"agent-attempt-{attempt:03d}.log", surroundings, reports=reports)
    reports.started()
    return Team(starter, num_processes, reports)
