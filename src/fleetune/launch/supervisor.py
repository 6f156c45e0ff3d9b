"""The one authority that starts a run, watches it, and starts it again: it holds no model and imports no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, final

from fleetune.launch.child import Call
from fleetune.launch.ending import Ending, Evidence, describe_exit, first_error, judge, next_attempt, progress, read_outcomes
from fleetune.launch.lease import Lease
from fleetune.launch.lifeline import Lifeline
from fleetune.launch.processes import LogTail, Process, Surroundings
from fleetune.launch.request import Launch, environment_of
from fleetune.launch.stop import StopSignals
from fleetune.launch.team import Store, Team, start_crew, start_solo
from fleetune.spec.errors import EXIT_CRASH, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER
from fleetune.spec.run_folder import RunFolder, append_line

_EXIT_CODES = {"done": EXIT_DONE, "user": EXIT_USER, "preempted": EXIT_PREEMPTED, "crash": EXIT_CRASH}


def supervise(
    folder: RunFolder,
    launch: Launch,
    *,
    on_poll: Callable[[], None] = lambda: None,
    say: Callable[[str], None] | None = None,
    lease: Lease | None = None,
) -> int:
    """Run what the folder's `run.yaml` asks, to its end; returns the exit code (0, 1, 2 or 75).

    on_poll: called about ten times a second meanwhile. say: gets what a person must hear, line by line (default: standard
    error). lease: where the caller holds it already (it must, to write `run.yaml`); else it is taken here. Raises UserError
    where a live process runs in this folder. While it runs, Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP make the workers save and
    end (75); a second Ctrl-C kills them. Call it in the main thread, or signals are not seen.
    """
    folder.create()
    with ExitStack() as stack:
        if lease is None:
            stack.enter_context(Lease.take(folder))
        stop = stack.enter_context(StopSignals())
        supervision = _Supervision(folder, launch, stop, on_poll, say or _say_on_stderr)
        stack.callback(supervision.close)
        return supervision.run()


def _say_on_stderr(line: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be closed; the run goes on
        print(line, file=sys.stderr, flush=True)


@final
class _Supervision:
    def __init__(
        self, folder: RunFolder, launch: Launch, stop: StopSignals, on_poll: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._folder, self._launch, self._stop = folder, launch, stop
        self._on_poll, self._say = on_poll, say
        self._commands, self._patience = launch.commands, launch.patience
        self._lifeline = Lifeline()
        environment, warning = environment_of(launch)
        if warning is not None:
            say(f"warning: {warning}")
        self._surroundings = Surroundings(environment, self._lifeline)
        self._attempt = next_attempt(folder)
        self._preparation: Process | None = None
        self._team: Team | None = None
        self._store: Store | None = None

    def run(self) -> int:
        # The workers' imports take longer than most preparations: they are done at the same time.
        self._start_team()
        code = self._prepare()
        if code is not None:
            return code
        best, fruitless = progress(self._folder), 0
        while True:
            ending = self._attempt_once()
            if ending.kind != "crash":
                return self._finish(ending)
            reached = progress(self._folder)
            fruitless = 0 if any(now > then for now, then in zip(reached, best)) else fruitless + 1
            best = (max(best[0], reached[0]), max(best[1], reached[1]))
            self._event("failure", ending, log=str(ending.log) if ending.log else None)
            if self._stop.requested is not None:
                return self._finish(ending)
            if fruitless > self._patience.restarts:
                self._event("gave_up", ending, restarts=self._patience.restarts)
                self._say(f"error: gave up after {self._patience.restarts} restarts without progress")
                return self._finish(ending)
            self._attempt += 1
            delay = self._patience.backoff(fruitless)
            self._event("restart", None, cause=ending.cause, step=reached[1] or None, delay_s=delay)
            self._start_team()
            if not self._pause(delay):
                return self._stopped("between two attempts: the last checkpoint stands")

    def close(self) -> None:
        """Nothing that was started outlives this."""
        for process in (self._preparation, self._team, self._store):
            if process is not None:
                process.kill() if isinstance(process, Process) else process.close()
        self._lifeline.close()

    def _start_team(self) -> None:
        if self._launch.num_processes == 1:
            self._team = start_solo(self._commands, self._folder, self._attempt, self._surroundings)
            return
        if self._store is None or self._store.process.exit_code is not None:
            if self._store is not None:
                self._store.close()
            self._store = Store(self._commands, self._folder, self._surroundings)
        self._team = start_crew(self._commands, self._folder, self._attempt, self._surroundings, self._launch.num_processes)

    def _prepare(self) -> int | None:
        """Run the preparation; None where it is done, else the exit code of the run."""
        log = self._folder.logs / f"prepare-attempt-{self._attempt:03d}.log"
        tail = LogTail(log)
        call = Call(self._commands.prepare, (str(self._folder.path), *self._launch.prepare_arguments))
        self._preparation = process = Process(call, log, self._surroundings)
        deadline: float | None = None
        while process.exit_code is None:
            if self._stop.requested is not None and deadline is None:
                deadline = time.monotonic() + self._patience.cleanup_s
                process.terminate()
            if self._stop.insisted or (deadline is not None and time.monotonic() > deadline):
                process.kill()
            self._beat()
            for line in tail.new_lines():
                self._say(line)
        for line in tail.new_lines():
            self._say(line)
        code = process.exit_code
        process.kill()  # whatever it may have started itself
        if self._stop.requested is not None:
            return self._stopped("while preparing: nothing was trained")
        if code == EXIT_DONE:
            return None
        if code == EXIT_USER:
            return EXIT_USER  # what is to be mended has been said
        cause = (first_error(log) if code and code > 0 else None) or describe_exit(code)
        ending = Ending("crash", f"the preparation failed: {cause}", log=log)
        self._event("failure", ending, log=str(log))
        self._say(f"error: {ending.cause}; see {log}")
        return EXIT_CRASH

    def _attempt_once(self) -> Ending:
        """Let the team go, watch it to its end, and judge it."""
        assert self._team is not None
        team = self._team
        arguments = self._store_arguments()
        if arguments is not None:
            self._event("start", None, num_processes=self._launch.num_processes)
            team.starter.go(arguments)
            self._watch(team)
        return self._close_team(team)

    def _store_arguments(self) -> tuple[str, ...] | None:
        """What the agent must know of the store; None where the store has ended instead of telling its address."""
        if self._launch.num_processes == 1:
            return ()
        assert self._store is not None
        while self._store.endpoint is None:
            if self._store.process.exit_code is not None or self._stop.insisted:
                return None
            self._beat()
        return ("--store", self._store.endpoint)

    def _watch(self, team: Team) -> None:
        """Wait for the team's end, with a bound on everything but the work itself."""
        deadline: float | None = None
        asked = False
        while not team.is_over:
            self._beat()
            team.look()
            if self._stop.insisted:
                team.kill()
            if self._stop.requested is not None and not asked and team.is_complete:
                asked = True
                team.ask_to_stop()
            allowed = self._allowance(team)
            if allowed is not None:
                bound = time.monotonic() + allowed
                deadline = bound if deadline is None else min(deadline, bound)
            if deadline is not None and time.monotonic() > deadline:
                team.kill()

    def _allowance(self, team: Team) -> float | None:
        """How long the rest of the team may go on from now, or None: as long as it wants."""
        outcomes = read_outcomes(self._folder, self._attempt, range(team.num_processes))
        kinds = {rank: outcome.kind for rank, (outcome, _) in outcomes.items()}
        vanished = any(rank not in kinds for rank in team.deaths)
        if vanished or "crash" in kinds.values():
            return self._patience.peers_s
        if "user" in kinds.values() or "preempted" in kinds.values() or len(kinds) == team.num_processes:
            return self._patience.cleanup_s
        return None if self._stop.requested is None else self._patience.save_s

    def _close_team(self, team: Team) -> Ending:
        left = team.close()
        self._team = None
        evidence = Evidence(
            num_processes=team.num_processes,
            outcomes=read_outcomes(self._folder, self._attempt, range(team.num_processes)),
            deaths=team.deaths,
            exit_codes=team.exit_codes,
            killed=frozenset(team.killed),
            asked_to_stop=self._stop.requested is not None,
        )
        if left:
            self._say(f"warning: processes {left} do not end, not even by SIGKILL: they hang in the system (a device, a disk)")
        if self._stop.insisted:
            return Ending("crash", "killed at the second Ctrl-C: the last checkpoint stands")
        return judge(evidence, self._folder, self._attempt)

    def _finish(self, ending: Ending) -> int:
        """Say how the run ended; returns its exit code."""
        self._event("stop", ending, kind=ending.kind)
        if ending.kind == "crash":
            self._say(f"error: {ending.text()}" if not self._stop.insisted else f"error: {ending.cause}")
        elif ending.kind != "done":
            prefix = "error: " if ending.kind == "user" else ""
            for line in ending.cause.splitlines():
                self._say(f"{prefix}{line}")
        return _EXIT_CODES[ending.kind]

    def _stopped(self, when: str) -> int:
        self._event("stop", Ending("preempted", f"{self._stop.requested} {when}"), kind="preempted")
        self._say(f"asked to stop {when}; go on with --resume")
        return EXIT_CRASH if self._stop.insisted else EXIT_PREEMPTED

    def _pause(self, seconds: float) -> bool:
        """Wait; False as soon as somebody asks to stop."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._stop.requested is None:
            self._beat()
        return self._stop.requested is None

    def _beat(self) -> None:
        began = time.monotonic()
        self._on_poll()
        time.sleep(max(0.0, self._patience.poll_s - (time.monotonic() - began)))

    def _event(self, what: str, ending: Ending | None, **more: Any) -> None:
        row = {"event": what, "attempt": self._attempt, "time": round(time.time(), 3)}
        if ending is not None:
            node = ending.node if ending.rank is not None else None
            row |= {"rank": ending.rank, "node": node, "step": ending.step, "cause": ending.cause or None}
        row |= more
        append_line(self._folder.events, {key: value for key, value in row.items() if value is not None})
