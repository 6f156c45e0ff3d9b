"""A run over several machines: one driver, on node 0, says when attempts begin and what follows from their end.

Each node's process leads its own ranks as a supervisor of one machine would. The driver has the store in which all ranks find
each other, joins what the nodes saw into one verdict, and starts again, with lost machines reached anew.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

from fleetune.launch.ending import Ending, Headway, next_attempt, progress
from fleetune.launch.evidence import NodeEnding, joined_ending, prepared_differences
from fleetune.launch.fleet import Fleet, FleetNode, described
from fleetune.launch.fleet_store import FleetStore
from fleetune.launch.lease import Lease
from fleetune.launch.lifeline import Lifeline
from fleetune.launch.processes import Surroundings
from fleetune.launch.record import Record
from fleetune.launch.request import Launch, environment_of
from fleetune.launch.stop import StopSignals
from fleetune.launch.supervisor import EXIT_CODES, last_words, say_on_stderr
from fleetune.spec.errors import EXIT_CRASH, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER, UserError
from fleetune.spec.run_folder import RunFolder, read_json

#: How long a node may take to make its run folder, and what its supervisor gets beyond its own patience.
_OPEN_S, _GRACE_S = 60.0, 8.0
#: How long a lost machine is waited for before the attempt counts as failed, and the seconds between two tries.
HAVE_BACK_S, RETRY_S = 180.0, 3.0


def supervise_fleet(
    folder: RunFolder,
    fleet: Fleet,
    launch: Launch,
    *,
    on_poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] | None = None,
    lease: Lease | None = None,
) -> int:
    """Run what the folder's `run.yaml` asks on all machines of the fleet, to its end; returns the exit code (0, 1, 2, 75).

    launch.num_processes are those of all machines. The rest is as in `supervise`; the fleet is closed by whoever made it.
    """
    folder.create()
    with ExitStack() as stack:
        if lease is None:
            stack.enter_context(Lease.take(folder))
        stop = stack.enter_context(StopSignals())
        run = _FleetRun(folder, fleet, launch, stop, on_poll, say or say_on_stderr)
        stack.callback(run.close)
        return run.run()


@final
class _FleetRun:
    def __init__(
        self,
        folder: RunFolder,
        fleet: Fleet,
        launch: Launch,
        stop: StopSignals,
        on_poll: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._fleet, self._launch, self._stop = folder, fleet, launch, stop
        self._on_poll, self._say, self._patience = on_poll, say, launch.patience
        self._record = Record(folder)
        self._attempt = next_attempt(folder)
        self._lifeline = Lifeline()
        surroundings = Surroundings(environment_of(launch)[0], self._lifeline)
        self._store = FleetStore(launch.commands, folder, surroundings, address=fleet.nodes[0].address, port=fleet.cluster.port)
        self._is_fresh = True
        self._marker = f".shared-{secrets.token_hex(8)}"
        fleet.folder, fleet.say = folder, self._say_of

    def run(self) -> int:
        self._store.start()
        problems = self._open(self._fleet.nodes, resume=False)
        if problems:
            raise UserError(*problems)
        code = self._prepare(self._fleet.nodes)
        if code is not None:
            return code
        headway = Headway(self._folder)
        while True:
            ending = self._attempt_once()
            if ending.kind != "crash":
                return self._finish(ending)
            headway.look()
            self._event("failure", ending, log=str(ending.log) if ending.log else None)
            if self._stop.requested is not None:
                return self._finish(ending)
            if headway.fruitless > self._patience.restarts:
                self._event("gave_up", ending, restarts=self._patience.restarts)
                self._say(f"error: gave up after {self._patience.restarts} restarts without progress")
                self._finish(ending)
                return EXIT_USER  # nobody should start it again as it is
            self._attempt += 1
            delay = self._patience.backoff(headway.fruitless)
            self._event("restart", None, cause=ending.cause, step=headway.step or None, delay_s=delay)
            if not self._pause(delay):
                return self._stopped("between two attempts: the last checkpoint stands")

    def close(self) -> None:
        """The nodes end by themselves when the fleet is closed; what this process started ends here."""
        (self._folder.path / self._marker).unlink(missing_ok=True)
        self._store.close()
        self._lifeline.close()

    def _open(self, nodes: list[FleetNode], *, resume: bool) -> list[str]:
        """Let nodes make their run folders, and learn which of them see node 0's. Returns problems."""
        (self._folder.path / self._marker).touch(mode=0o600)
        order = {
            "do": "open",
            "folder": str(self._folder.path),
            "marker": self._marker,
            "run": self._folder.spec.read_text(encoding="utf-8"),
            "plan": self._folder.plan.read_text(encoding="utf-8") if self._folder.plan.exists() else "{}",
            "resume": resume or progress(self._folder) != (0, 0) or self._attempt > 0,
        }
        for node in nodes:
            node.send({**order, "node": node.number})
        answers, problems = self._fleet.wait(nodes, "opened", _OPEN_S, poll=self._on_poll)
        for node in nodes:
            for problem in answers.get(node.number, {}).get("problems", ()):
                problems.append(f"host {node.host}: {problem}")
        return problems

    def _prepare(self, nodes: list[FleetNode]) -> int | None:
        """Preparation on these nodes, each with its own caches; None where all is ready, else the exit code of the run."""
        codes: dict[int, int] = {}
        found: dict[int, dict[str, Any]] = {}
        asked: list[FleetNode] = []
        told = False
        while len(codes) < len(asked) or (len(asked) < len(nodes) and not told):
            is_first_done = nodes[0].number != 0 or codes.get(0) == EXIT_DONE
            asked += self._ask_to_prepare(nodes[len(asked) :], is_first_done=is_first_done)
            is_over = self._stop.requested is not None or any(code != EXIT_DONE for code in codes.values())
            told = self._pass_on_stop(asked, told or is_over, told)
            self._beat()
            for node in asked:
                row = node.take("prepared")
                failure = node.connection.failure() if row is None else None
                if row is not None:
                    codes[node.number], found[node.number] = int(row["prepared"]), row["found"]
                elif failure is not None and node.number not in codes:
                    self._say(f"error: {described(node, failure)}, while it prepared")
                    codes[node.number] = EXIT_CRASH
        if self._stop.requested is not None:
            return self._stopped("while preparing: nothing was trained")
        worst = next((code for code in (EXIT_USER, EXIT_CRASH) if code in codes.values()), None)
        if worst is not None:
            if worst == EXIT_USER and not self._folder.ledger.exists():
                self._fleet.tell({"do": "forget"})
            return worst
        differences = prepared_differences([(node, found[node.number]) for node in nodes])
        for line in differences:
            self._say(f"error: {line}")
        return EXIT_USER if differences else None

    def _ask_to_prepare(self, nodes: list[FleetNode], *, is_first_done: bool) -> list[FleetNode]:
        """Ask those of these nodes that can begin: node 0 at once, the others when it has said what all compute in."""
        row = read_json(self._folder.precision) if self._folder.precision.exists() else {}
        decided = str(row["precision"]) if row.get("device") == self._launch.device else None
        can = [node for node in nodes if node.number == 0 or decided is not None or is_first_done]
        for node in can:
            node.send(self._prepare_order(node, decided))
        return can

    def _prepare_order(self, node: FleetNode, decided: str | None) -> dict[str, Any]:
        launch = self._launch
        told = ("--precision", decided) if node.number and decided is not None else ()
        return {
            "do": "prepare",
            "attempt": self._attempt,
            "address": node.address,
            "num_processes": node.num_processes,
            "num_nodes": len(self._fleet.nodes),
            "first_rank": node.first_rank,
            "threads": launch.threads,
            "device": launch.device,
            "environment": dict(launch.environment),
            "prepare_arguments": [*launch.prepare_arguments, *told],
            "commands": dataclasses.asdict(launch.commands),
            "patience": dataclasses.asdict(launch.patience),
        }

    def _attempt_once(self) -> Ending:
        """One attempt on all nodes, to its verdict."""
        nodes = self._fleet.nodes
        failure = self._stand_ready()
        if failure is not None:
            return failure
        endpoint = self._store.endpoint(self._beat, lambda: self._stop.insisted)
        if endpoint is None:
            return Ending("crash", self._store.failure())
        self._event("start", None, num_processes=self._launch.num_processes, num_nodes=len(nodes))
        for node in nodes:
            node.send({"do": "go", "store": endpoint})
        ended: dict[int, NodeEnding] = {}
        lost: dict[int, str] = {}
        deadline: float | None = None
        told = killed = insisted = False
        while len(ended) + len(lost) < len(nodes):
            told = self._pass_on_stop(nodes, self._stop.requested is not None, told)
            if self._stop.insisted and not insisted:
                insisted = True
                self._fleet.tell({"do": "kill"})
            self._beat()
            self._collect(ended, lost)
            if deadline is None and (ended or lost):
                kinds = {end.ending.kind for end in ended.values()}
                wait = self._patience.peers_s if lost or "crash" in kinds else self._patience.cleanup_s
                deadline = time.monotonic() + wait + _GRACE_S
            if deadline is not None and not killed and time.monotonic() > deadline:
                killed = True
                self._fleet.tell({"do": "kill"})
        if self._stop.insisted:
            return Ending("crash", "killed at the second Ctrl-C: the last checkpoint stands")
        return joined_ending(self._folder, self._attempt, nodes, ended, lost, asked_to_stop=self._stop.requested is not None)

    def _collect(self, ended: dict[int, NodeEnding], lost: dict[int, str]) -> None:
        """Take what nodes say of their ends, and see which of them are lost."""
        for node in self._fleet.nodes:
            if node.number in ended or node.number in lost:
                continue
            failure = node.connection.failure()
            if failure is not None:
                self._fleet.pump()
            row = node.take("ended")
            if row is not None:
                ended[node.number] = NodeEnding.of_row(row["ended"], node.num_processes)
            elif failure is not None:
                lost[node.number] = described(node, failure)

    def _stand_ready(self) -> Ending | None:
        """All nodes connected and their workers importing. The first attempt was made ready by the preparation."""
        self._store.start()
        if self._is_fresh:
            self._is_fresh = False
            return None
        for node in self._fleet.nodes:
            failure = node.connection.failure()
            if failure is None:
                node.answers.clear()
                node.send({"do": "again", "attempt": self._attempt})
                continue
            problem = self._have_back(node)
            problems = [problem] if problem else self._open([node], resume=True)
            if not problems and self._prepare([node]) is not None:
                problems = [f"host {node.host} could not prepare again"]
            if problems:
                return Ending(
                    "crash", f"{node.name} is lost and cannot be had back: {problems[0]}", node.first_rank, node.number
                )
        return None

    def _have_back(self, node: FleetNode) -> str | None:
        """Reach a lost machine again, for some minutes: it may start anew, a cable may be plugged in. Why not, or None."""
        deadline = time.monotonic() + HAVE_BACK_S
        self._say(f"warning: {node.name} is lost: trying to reach it for {HAVE_BACK_S:.0f} s")
        while True:
            problem = self._fleet.reconnect(node, poll=self._on_poll)
            if problem is None or time.monotonic() > deadline or not self._pause(RETRY_S):
                return problem

    def _pass_on_stop(self, nodes: list[FleetNode], asked: bool, told: bool) -> bool:
        if asked and not told:
            for node in nodes:
                node.send({"do": "stop"})
        return asked or told

    def _finish(self, ending: Ending) -> int:
        """Say how the run ended; returns its exit code."""
        self._event("stop", ending, kind=ending.kind)
        for line in last_words(ending, insisted=self._stop.insisted):
            self._say(line)
        if ending.kind == "crash" and progress(self._folder)[0]:
            self._say("the last checkpoint stands: go on with --resume")
        return EXIT_CODES[ending.kind]

    def _stopped(self, when: str) -> int:
        self._event("stop", Ending("preempted", f"{self._stop.requested} {when}"), kind="preempted")
        self._say(f"asked to stop {when}; go on with --resume")
        return EXIT_CRASH if self._stop.insisted else EXIT_PREEMPTED

    def _say_of(self, node: FleetNode, line: str) -> None:
        """A line of a node; the person hears from which, where it is not this machine's."""
        if node.number == 0:
            self._say(line)
        elif line.startswith("error: "):
            self._say(f"error: {node.host}: {line.removeprefix('error: ')}")
        else:
            self._say(f"{node.host}: {line}")

    def _pause(self, seconds: float) -> bool:
        """Wait; False as soon as somebody asks to stop."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._stop.requested is None:
            self._beat()
        return self._stop.requested is None

    def _beat(self) -> None:
        began = time.monotonic()
        self._fleet.pump()
        self._on_poll()
        time.sleep(max(0.0, self._patience.poll_s - (time.monotonic() - began)))

    def _event(self, what: str, ending: Ending | None, **more: Any) -> None:
        self._record.event(what, self._attempt, ending, **more)
