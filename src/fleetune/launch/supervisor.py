"""The one authority that starts a run, watches it, and starts it again: it holds no model and imports no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import final

from fleetune.launch.devices import count_gpus
from fleetune.launch.ending import Ending, Headway, next_attempt
from fleetune.launch.ground import Ground
from fleetune.launch.lease import Lease
from fleetune.launch.preparation import Preparation
from fleetune.launch.record import Record
from fleetune.launch.request import Launch
from fleetune.launch.size import Size, take_request
from fleetune.launch.stop import StopSignals
from fleetune.launch.team import Team
from fleetune.launch.watch import Watch, unkillable
from fleetune.spec.errors import EXIT_CRASH, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER, UserError
from fleetune.spec.run_folder import RunFolder

EXIT_CODES = {"done": EXIT_DONE, "user": EXIT_USER, "preempted": EXIT_PREEMPTED, "crash": EXIT_CRASH}


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
        supervision = _Supervision(folder, launch, stop, on_poll, say or say_on_stderr)
        stack.callback(supervision.close)
        return supervision.run()


def say_on_stderr(line: str) -> None:
    with suppress(OSError, ValueError):  # the terminal may be closed; the run goes on
        print(line, file=sys.stderr, flush=True)


def last_words(ending: Ending, *, insisted: bool) -> list[str]:
    """What a person hears at the end of a run; nothing where it is done. insisted: by a second Ctrl-C."""
    if ending.kind == "done":
        return []
    if ending.kind == "crash":
        return [f"error: {ending.cause if insisted else ending.text()}"]
    prefix = "error: " if ending.kind == "user" else ""
    return [f"{prefix}{line}" for line in ending.cause.splitlines()]


@final
class _Supervision:
    def __init__(
        self, folder: RunFolder, launch: Launch, stop: StopSignals, on_poll: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._folder, self._launch, self._stop = folder, launch, stop
        self._on_poll, self._say = on_poll, say
        self._patience = launch.patience
        self._record = Record(folder)
        at_least = launch.num_processes if launch.min_processes is None else launch.min_processes
        count = count_gpus if launch.device == "cuda" else None
        self._size = Size(launch.num_processes, at_least, count_devices=count)
        self._ground = Ground(folder, launch, self._size, say)
        self._attempt = next_attempt(folder)
        self._waiting = ("first_step", time.monotonic())
        self._asked_size: int | None = None
        self._preparation: Preparation | None = None
        self._team: Team | None = None

    def run(self) -> int:
        take_request(self._folder)  # one that nobody took up, of an earlier time
        # The workers' imports take longer than most preparations: they are done at the same time.
        self._ground.ready()
        code = self._prepare()
        if code is not None:
            return code
        headway = Headway(self._folder)
        while True:
            ending = self._attempt_once()
            if ending.kind == "preempted" and self._stop.requested is None and self._asked_size is not None:
                # All have saved, because somebody asked for another number of processes.
                self._resize(None)
                self._attempt += 1
                self._ground.ready()
                continue
            if ending.kind != "crash":
                return self._finish(ending)
            headway.look()
            if self._stop.requested is not None:
                return self._finish(ending)
            if self._resize(ending):
                headway.fruitless = 0  # another run in a way: it gets its own tries
            if headway.fruitless > self._patience.restarts:
                return self._give_up(ending)
            self._attempt += 1
            delay = self._patience.backoff(headway.fruitless)
            self._record.event("restart", self._attempt, None, cause=ending.cause, step=headway.step or None, delay_s=delay)
            self._ground.ready()
            if not self._pause(delay):
                return self._stopped("between two attempts: the last checkpoint stands")

    def close(self) -> None:
        """Nothing that was started outlives this."""
        if self._preparation is not None:
            self._preparation.kill()
        if self._team is not None:
            self._team.close()
        self._ground.close()

    def _resize(self, ending: Ending | None) -> bool:
        """Change the number of processes where somebody has asked for it, or where a failure (ending) makes it necessary."""
        asked, self._asked_size = self._asked_size, None
        before = self._size.devices
        change = self._size.to(asked, "asked for") if asked is not None else None
        if change is None and ending is not None:
            change = self._size.after_failure(ending)
        if change is None:
            return False
        try:
            self._launch.replan(change.after)
        except UserError as error:
            self._size.devices = before
            self._record.event("resize_refused", self._attempt, None, cause=str(error), gpus=change.after)
            self._say(f"warning: the run cannot go on with {change.after} processes, and keeps {change.before}: {error}")
            return False
        self._record.event("resize", self._attempt, None, cause=change.cause, before=change.before, after=change.after)
        return True

    def _is_to_leave(self) -> bool:
        """Whether the workers are to save and end: by a signal, or to go on in another number."""
        asked = take_request(self._folder)
        if asked is not None and asked != self._size.num_processes:
            self._asked_size = asked
        return self._stop.requested is not None or self._asked_size is not None

    def _prepare(self) -> int | None:
        """Run the preparation; None where it is done, else the exit code of the run."""
        log = self._folder.logs / f"prepare-attempt-{self._attempt:03d}.log"
        self._preparation = preparation = Preparation(self._folder, self._launch, self._ground.surroundings, log)
        code = preparation.follow(self._stop, beat=self._beat, say=self._say)
        if self._stop.requested is not None:
            return self._stopped("while preparing: nothing was trained")
        if code == EXIT_DONE:
            return None
        if code == EXIT_USER:
            return EXIT_USER  # what is to be mended has been said
        ending = Ending("crash", preparation.failure(), log=log)
        self._record.event("failure", self._attempt, ending, log=str(log))
        self._say(f"error: {ending.cause}; see {log}")
        return EXIT_CRASH

    def _attempt_once(self) -> Ending:
        """Start the workers, watch them to their end, and judge it."""
        self._ground.ready()
        store = self._ground.endpoint(self._beat, lambda: self._stop.insisted)
        if store is None:
            log = self._folder.logs / "store.log"
            return Ending("crash", "the store in which the ranks find each other did not start", log=log)
        self._record.event("start", self._attempt, None, num_processes=self._size.num_processes)
        self._team = team = self._ground.start(self._attempt, store)
        watch = Watch(self._folder, self._attempt, team, record=self._record, patience=self._patience, stop=self._stop)
        watch.follow(self._beat, leave=self._is_to_leave, since=self._waiting)
        self._waiting = ("resized", time.monotonic())
        ending, left = watch.end()
        self._team = None
        if left:
            self._say(unkillable(left))
        if self._stop.insisted:
            ending = Ending("crash", "killed at the second Ctrl-C: the last checkpoint stands")
        if ending.kind == "crash":
            found_at = watch.detected_at if watch.detected_at is not None else time.monotonic()
            self._waiting = ("recovered", found_at)
            detection_s = None if watch.detection_s is None else round(watch.detection_s, 3)
            where = str(ending.log) if ending.log else None
            self._record.event("failure", self._attempt, ending, log=where, detection_s=detection_s)
        return ending

    def _give_up(self, ending: Ending) -> int:
        """Restarts do not help: what remains is for a person to mend, so nobody should start the run again as it is."""
        self._record.event("gave_up", self._attempt, ending, restarts=self._patience.restarts)
        self._say(f"error: gave up after {self._patience.restarts} restarts without progress: {ending.text()}")
        self._record.event("stop", self._attempt, ending, kind=ending.kind)
        return EXIT_USER

    def _finish(self, ending: Ending) -> int:
        """Say how the run ended; returns its exit code."""
        self._record.event("stop", self._attempt, ending, kind=ending.kind)
        for line in last_words(ending, insisted=self._stop.insisted):
            self._say(line)
        return EXIT_CODES[ending.kind]

    def _stopped(self, when: str) -> int:
        self._record.event("stop", self._attempt, Ending("preempted", f"{self._stop.requested} {when}"), kind="preempted")
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
