"""How an attempt ended, and why: read from the ranks' outcome files, their exit codes and their logs."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import final

from fleetune.spec.records import Outcome
from fleetune.spec.run_folder import RunFolder, read_json, read_lines

_CHECKPOINT = re.compile(r"step-(\d+)")
_ATTEMPT = re.compile(r".*-attempt-(\d+)\.(?:log|json)")
_TRACEBACK = "Traceback (most recent call last):"
#: Only so much of a log is looked through for its first traceback.
_MAX_LOG = 16 << 20


@dataclass(frozen=True)
class Ending:
    """kind: `done`, `user`, `preempted` or `crash`. cause: one line. rank: the one it began with; None: no rank at all."""

    kind: str
    cause: str = ""
    rank: int | None = None
    node: int = 0
    step: int | None = None
    log: Path | None = None

    def text(self) -> str:
        """Everything in one line: which rank, where, when, why, and where to read on."""
        who = f"rank {self.rank} (node {self.node})" if self.rank is not None else "the run"
        when = f" after step {self.step}" if self.step is not None else " before its first step"
        where = f"; see {self.log}" if self.log is not None else ""
        return f"{who} failed{when}: {self.cause}{where}"


@dataclass(frozen=True)
class Evidence:
    """What is known of the ranks of an attempt when all processes have ended.

    outcomes: of the ranks that wrote one, with the time of writing (seconds since 1970). deaths: when a rank's end was seen.
    exit_codes: as far as known, negative for a signal. killed: ranks that we ended ourselves. asked_to_stop: by us.
    """

    num_processes: int
    outcomes: Mapping[int, tuple[Outcome, float]]
    deaths: Mapping[int, float]
    exit_codes: Mapping[int, int]
    killed: frozenset[int]
    asked_to_stop: bool


def read_outcomes(folder: RunFolder, attempt: int, ranks: Iterable[int]) -> dict[int, tuple[Outcome, float]]:
    """The outcomes that these ranks have written so far. One that cannot be read counts as not written."""
    found = {}
    names = {field.name for field in fields(Outcome)}
    for rank in ranks:
        path = folder.outcome(rank, attempt)
        try:
            row = read_json(path)
            outcome = Outcome(**{name: value for name, value in row.items() if name in names})
            found[rank] = (outcome, path.stat().st_mtime)
        except (OSError, ValueError, TypeError):
            continue
    return found


def judge(evidence: Evidence, folder: RunFolder, attempt: int) -> Ending:
    """How the attempt ended as a whole.

    One rank's wish decides over its peers, whose own failures only follow from its end: what the person must mend comes
    first, then a saved preemption (all ranks saved together), then the crash that came first. All done is done.
    """
    outcomes = {rank: outcome for rank, (outcome, _) in evidence.outcomes.items()}
    for kind in ("user", "preempted"):
        of_kind = sorted(rank for rank, outcome in outcomes.items() if outcome.kind == kind)
        if of_kind:
            return _from_outcome(outcomes[of_kind[0]], folder, attempt)
    if len(outcomes) == evidence.num_processes and all(outcome.kind == "done" for outcome in outcomes.values()):
        return Ending("done")
    rank = _first_failure(evidence)
    if rank is not None and rank in outcomes:
        return _from_outcome(outcomes[rank], folder, attempt)
    if evidence.asked_to_stop and (rank is None or evidence.exit_codes.get(rank) == -signal.SIGTERM):
        return Ending("preempted", "asked to stop before training had begun: nothing was to be saved")
    return Ending(
        "crash", _silent_cause(evidence, rank, folder, attempt), rank, 0, last_step(folder), _log(folder, rank, attempt)
    )


def last_step(folder: RunFolder) -> int | None:
    """The last step that was committed, counted from 1; None before the first."""
    return max((row["step"] for row in read_lines(folder.ledger) if isinstance(row.get("step"), int)), default=None)


def progress(folder: RunFolder) -> tuple[int, int]:
    """How far the run has ever come: (step of its highest checkpoint, highest committed step)."""
    checkpoints = [0]
    if folder.checkpoints.is_dir():
        for path in folder.checkpoints.iterdir():
            match = _CHECKPOINT.fullmatch(path.name)
            if match and (path / "manifest.json").exists():
                checkpoints.append(int(match[1]))
    return max(checkpoints), last_step(folder) or 0


@final
class Headway:
    """Whether a run that is started again and again gets anywhere. step: the highest committed one, when last looked.
    fruitless: attempts in a row that brought neither a new step nor a new checkpoint."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._best = progress(folder)
        self.step, self.fruitless = self._best[1], 0

    def look(self) -> None:
        """After a failed attempt."""
        reached = progress(self._folder)
        self.fruitless = 0 if any(now > then for now, then in zip(reached, self._best)) else self.fruitless + 1
        self._best = (max(self._best[0], reached[0]), max(self._best[1], reached[1]))
        self.step = reached[1]


def next_attempt(folder: RunFolder) -> int:
    """The number of the next attempt: above every one that ever left a trace here, since a later one's rows replace
    an earlier one's."""
    seen = [-1]
    for room in (folder.logs, folder.outcomes):
        if room.is_dir():
            seen += [int(match[1]) for path in room.iterdir() if (match := _ATTEMPT.fullmatch(path.name))]
    for file in (folder.events, folder.ledger):
        seen += [row["attempt"] for row in read_lines(file) if isinstance(row.get("attempt"), int)]
    return max(seen) + 1


def first_error(log: Path) -> str | None:
    """The last line of the first traceback in a log: what went wrong first, before anything that followed from it."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = file.read(_MAX_LOG).splitlines()
    except OSError:
        return None
    if _TRACEBACK not in lines:
        return None
    for line in lines[lines.index(_TRACEBACK) + 1 :]:
        if line and not line.startswith((" ", "\t", "|", "+")):
            return line.strip()
    return None


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended without a word"
    if code >= 0:
        return f"ended with exit code {code} and said no more"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    why = ": somebody killed it, or the machine ran out of memory" if -code == signal.SIGKILL else ""
    return f"killed by signal {-code} ({name}){why}"


def _first_failure(evidence: Evidence) -> int | None:
    """The rank whose failure the others follow from.

    A rank that vanished without an outcome comes before ranks that failed in an orderly way, since those notice it. Except
    the vanished that were only told to go: by us, or by the agent's SIGTERM after the first failure.
    """
    orderly = {rank: time for rank, (outcome, time) in evidence.outcomes.items() if outcome.kind == "crash"}
    vanished = {
        rank: time
        for rank, time in evidence.deaths.items()
        if rank not in evidence.outcomes and rank not in evidence.killed and evidence.exit_codes.get(rank) != -signal.SIGTERM
    }
    others = {rank: time for rank, time in evidence.deaths.items() if rank not in evidence.outcomes}
    for group in (vanished, orderly, others):
        if group:
            return min(group, key=lambda rank: (group[rank], rank))
    return None


def _from_outcome(outcome: Outcome, folder: RunFolder, attempt: int) -> Ending:
    step = outcome.step if outcome.step is not None else last_step(folder)
    return Ending(outcome.kind, outcome.cause, outcome.rank, outcome.node, step, _log(folder, outcome.rank, attempt))


def _silent_cause(evidence: Evidence, rank: int | None, folder: RunFolder, attempt: int) -> str:
    if rank is None:
        started = len(evidence.deaths)
        error = first_error(folder.logs / f"agent-attempt-{attempt:03d}.log")
        return f"{started} of {evidence.num_processes} workers were started" + (f": {error}" if error else "")
    if rank in evidence.killed:
        return "it did not end when it was told to, and was killed"
    error = first_error(folder.log(rank, attempt))
    told = describe_exit(evidence.exit_codes.get(rank))
    return f"{told}; the first error in its log is {error}" if error else told


def _log(folder: RunFolder, rank: int | None, attempt: int) -> Path | None:
    path = folder.logs / f"agent-attempt-{attempt:03d}.log" if rank is None else folder.log(rank, attempt)
    return path if path.exists() else None
