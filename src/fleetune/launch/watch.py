"""Watching one attempt to its end, with a bound on everything but the work itself."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import final

from fleetune.launch.ending import Ending, Evidence, judge, last_step, read_outcomes
from fleetune.launch.liveness import AGENT, PHASES, Hang
from fleetune.launch.record import Record
from fleetune.launch.request import Patience
from fleetune.launch.stop import StopSignals
from fleetune.launch.team import Team
from fleetune.spec.run_folder import RunFolder

#: Seconds between two pictures of the ranks in `heartbeat/`.
_PICTURE_S = 1.0


def unkillable(processes: list[int]) -> str:
    return f"warning: processes {processes} do not end, not even by SIGKILL: they hang in the system (a device, a disk)"


@final
class Watch:
    """One attempt of a run. Call `follow`, then `end`.

    detected_at: when what ended the attempt was found (monotonic). detection_s: after what time. None where nothing failed.
    hang: how a rank hung, where one did. evidence: what the ranks left behind, after `end`.
    """

    def __init__(
        self, folder: RunFolder, attempt: int, team: Team, *, record: Record, patience: Patience, stop: StopSignals
    ) -> None:
        self._folder, self._attempt, self._team = folder, attempt, team
        self._record, self._patience, self._stop = record, patience, stop
        self._began = time.monotonic()
        self._deadline: float | None = None
        self._is_failing = False
        self.hang: Ending | None = None
        self._is_asked = False
        self._has_stepped = False
        self._pictured_at = 0.0
        self.detected_at: float | None = None
        self.detection_s: float | None = None
        self.evidence: Evidence | None = None

    def follow(self, beat: Callable[[], None], *, leave: Callable[[], bool], since: tuple[str, float]) -> None:
        """Wait for the end of all processes.

        beat: waits a moment, and does what must go on meanwhile. leave: True asks the workers to save and end, as a signal
        does. since: what the first step will tell in `events.jsonl`, and the monotonic time from which on it was waited for.
        """
        team = self._team
        while not team.is_over:
            beat()
            team.look()
            if self._stop.insisted:
                team.kill()
            if not self._is_asked and team.is_complete and leave():
                self._is_asked = True
                team.ask_to_stop()
            self._look_for_hang()
            self._tell_first_step(*since)
            self._picture()
            self._bound(self._allowance())
            if self._deadline is not None and time.monotonic() > self._deadline:
                team.kill()
        team.look()
        self._tell_first_step(*since)
        self._find_failure()

    def end(self) -> tuple[Ending, list[int]]:
        """(how the attempt ended, processes that not even SIGKILL has ended). Nothing else is left of it."""
        left = self._team.close()
        for path in self._folder.heartbeat.glob("rank-*.json"):
            path.unlink(missing_ok=True)
        evidence = Evidence(
            num_processes=self._team.num_processes,
            outcomes=read_outcomes(self._folder, self._attempt, self._team.ranks),
            deaths=self._team.deaths,
            exit_codes=self._team.exit_codes,
            killed=frozenset(self._team.killed),
            asked_to_stop=self._is_asked or self._stop.requested is not None,
        )
        self.evidence = evidence
        ending = judge(evidence, self._folder, self._attempt)
        # What a rank said of itself before it was found hanging counts more: all had saved, say.
        return (self.hang if self.hang is not None and ending.kind == "crash" else ending), left

    def _look_for_hang(self) -> None:
        """A hang ends the attempt; but ranks that only wait for one that has failed do not hang."""
        if self.hang is not None or self._is_failing:
            return
        if not self._team.is_complete and time.monotonic() - self._began > PHASES["start"]:
            come = f"{len(self._team.members)} of {self._team.num_processes} workers"
            self.hang = Ending("crash", f"only {come} came within {PHASES['start']:.0f} s: what starts them hangs")
            self._team.kill()
            return
        hangs = self._team.liveness.hung()
        if not hangs:
            return
        logs = {rank: self._folder.log(rank, self._attempt) for rank in self._team.ranks}
        hang = hangs[0] if hangs[0].rank == AGENT else self._team.who_hangs(hangs, logs)
        if hang.phase in ("step", "data"):
            # Its last sign of life may be some fast steps old; the ledger tells which one is not made.
            hang = dataclasses.replace(hang, phase="step", step=max(hang.step, (last_step(self._folder) or 0) + 1))
        self.hang = self._ending_of(hang)
        self.detected_at, self.detection_s = time.monotonic(), hang.seconds
        self._record.event(
            "hang", self._attempt, self.hang, phase=hang.phase, silent=hang.silent, seconds=round(hang.seconds, 3)
        )
        self._team.kill()

    def _ending_of(self, hang: Hang) -> Ending:
        rank = None if hang.rank == AGENT else hang.rank
        log = self._folder.log(hang.rank, self._attempt) if rank is not None else None
        return Ending("crash", hang.cause(), rank, 0, last_step(self._folder), log)

    def _find_failure(self) -> None:
        """When the failure was found: a hang has said so; a death is seen at a look, and happened since the one before."""
        if self.detected_at is None and self._team.first_death is not None:
            self.detected_at, self.detection_s = self._team.first_death

    def _tell_first_step(self, what: str, began: float) -> None:
        if not self._has_stepped and self._team.liveness.has_stepped:
            self._has_stepped = True
            self._record.event(what, self._attempt, None, recovery_s=round(time.monotonic() - began, 3))

    def _allowance(self) -> float | None:
        """How long the rest of the team may go on from now, or None: as long as it wants."""
        team = self._team
        outcomes = read_outcomes(self._folder, self._attempt, team.ranks)
        kinds = {rank: outcome.kind for rank, (outcome, _) in outcomes.items()}
        team.liveness.saw_end(kinds)
        vanished = any(rank not in kinds for rank in team.deaths)
        if vanished or "crash" in kinds.values():
            self._is_failing = True
            return self._patience.peers_s
        if "user" in kinds.values() or "preempted" in kinds.values() or len(kinds) == team.num_processes:
            return self._patience.cleanup_s
        return self._patience.save_s if self._is_asked or self._stop.requested is not None else None

    def _bound(self, allowed: float | None) -> None:
        if allowed is not None:
            bound = time.monotonic() + allowed
            self._deadline = bound if self._deadline is None else min(self._deadline, bound)

    def _picture(self) -> None:
        """What each rank is doing, one small file a rank, for whoever looks at the run from outside."""
        now = time.monotonic()
        if now - self._pictured_at < _PICTURE_S:
            return
        self._pictured_at = now
        for rank, state in self._team.liveness.state().items():
            member = self._team.members.get(rank)
            row = {"version": 1, "attempt": self._attempt, "rank": rank, "node": 0, "pid": member and member.pid, **state}
            path = self._folder.heartbeat / f"rank-{rank:05d}.json"
            draft = path.with_suffix(".tmp")
            with suppress(OSError):  # a full disk must not end a run that has nothing to save
                draft.write_text(json.dumps(row) + "\n", encoding="utf-8")
                os.replace(draft, path)
