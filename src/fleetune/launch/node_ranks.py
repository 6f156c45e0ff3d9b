"""One node's part of a run: its preparation, then a team for each attempt, all of them forked from one process with imports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from fleetune.launch.evidence import NodeEnding
from fleetune.launch.ground import Ground
from fleetune.launch.preparation import Preparation
from fleetune.launch.record import Record
from fleetune.launch.request import Launch
from fleetune.launch.size import Size
from fleetune.launch.stop import StopSignals
from fleetune.launch.team import Team
from fleetune.launch.watch import Watch, unkillable
from fleetune.spec.errors import EXIT_CRASH, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER
from fleetune.spec.run_folder import RunFolder


@final
class NodeRanks:
    """What runs on this machine. poll: called about ten times a second; it raises where the driver is gone."""

    def __init__(
        self, folder: RunFolder, launch: Launch, stop: StopSignals, poll: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._folder, self._launch, self._stop = folder, launch, stop
        self._poll, self._say = poll, say
        self._ground = Ground(folder, launch, Size(launch.num_processes, launch.num_processes), say)
        self._record = Record(folder, keeps=launch.node == 0)  # one node tells of the whole run's steps
        self._preparation: Preparation | None = None
        self._team: Team | None = None
        self._waiting = ("first_step", time.monotonic())

    def prepare(self, attempt: int) -> int:
        """Run the preparation, while the workers' imports begin; returns an exit code. What is to be mended is said."""
        self._ground.ready()
        log = self._folder.node_log("prepare", self._launch.node, attempt)
        self._preparation = preparation = Preparation(self._folder, self._launch, self._ground.surroundings, log)
        code = preparation.follow(self._stop, beat=self._beat, say=self._say)
        if self._stop.requested is not None:
            return EXIT_PREEMPTED
        if code not in (EXIT_DONE, EXIT_USER):
            self._say(f"error: {preparation.failure()}; see {log}")
            return EXIT_CRASH
        return code

    def ready(self) -> None:
        """Let the imports begin, where they are not done."""
        self._ground.ready()

    def attempt(self, number: int, store: str) -> NodeEnding:
        """This node's ranks of one attempt, to their end. store: `host:port` of the driver's."""
        self._ground.ready()
        self._team = team = self._ground.start(number, store)
        watch = Watch(self._folder, number, team, record=self._record, patience=self._launch.patience, stop=self._stop)
        watch.follow(self._beat, leave=lambda: self._stop.requested is not None, since=self._waiting)
        ending, left = watch.end()
        self._team = None
        self._waiting = ("recovered", watch.detected_at if watch.detected_at is not None else time.monotonic())
        if left:
            self._say(unkillable(left))
        assert watch.evidence is not None
        return NodeEnding(ending, watch.evidence, hangs=watch.hang is not None and ending is watch.hang)

    def close(self) -> None:
        """Nothing that was started here outlives this."""
        if self._preparation is not None:
            self._preparation.kill()
        if self._team is not None:
            self._team.close()
        self._ground.close()

    def _beat(self) -> None:
        began = time.monotonic()
        self._poll()
        time.sleep(max(0.0, self._launch.patience.poll_s - (time.monotonic() - began)))
