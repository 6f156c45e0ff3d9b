"""What failures have cost a run: worked out from its events, metrics and ledger.

The supervisor's rows carry `elapsed_s`, by a clock that nobody sets; it begins anew with each start of the program, so a run
that was resumed is the sum of its sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fleetune.monitor.figures import count, duration, plural, share
from fleetune.monitor.ledger import read_chain
from fleetune.spec.run_folder import RunFolder, effective_rows, read_lines

#: Kinds of events that the supervisor writes.
_SUPERVISED = {"start", "first_step", "recovered", "resized", "failure", "hang", "restart", "gave_up", "resize", "stop"}


@dataclass(frozen=True)
class Account:
    """What a run has cost in time. Seconds; None where nothing of the kind has happened.

    effective_training_time_ratio: time in the steps that led to the final weights / time of all sessions.
    mean_detection_s: from the last sign of life of what failed to its being found. mean_recovery_s: from there to the end of
    the first step of the next attempt. cold_start_s: from the start of the program to its first step, on average over
    sessions. recomputed_steps: made again, because they came after the last checkpoint. save_stall_s: mean time that a save
    kept the loop waiting.
    """

    sessions: int
    failures: int
    restarts: int
    resizes: int
    wall_s: float
    effective_s: float
    effective_training_time_ratio: float | None
    mean_detection_s: float | None
    mean_recovery_s: float | None
    max_recovery_s: float | None
    cold_start_s: float | None
    recomputed_steps: int
    saves: int
    save_stall_s: float | None

    @property
    def is_eventful(self) -> bool:
        """Whether something happened that a person should be told of."""
        return bool(self.failures or self.resizes or self.recomputed_steps)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def account_of(folder: RunFolder) -> Account:
    """The account of a run, also of one that is still going on or was killed."""
    events = list(read_lines(folder.events))
    sessions = _sessions(row for row in events if row.get("event") in _SUPERVISED and "elapsed_s" in row)
    wall_s = sum(max(float(row["elapsed_s"]) for row in session) for session in sessions)
    steps = effective_rows(folder.metrics)
    effective_s = sum(float(row.get("step_s") or 0.0) + float(row.get("data_wait_s") or 0.0) for row in steps.values())
    recoveries = _figures(events, "recovered", "recovery_s")
    saves = [row for row in events if row.get("event") == "save"]
    stalls = [float(row.get("stall_s", row.get("seconds")) or 0.0) for row in saves]
    return Account(
        sessions=len(sessions),
        failures=_count(events, "failure"),
        restarts=_count(events, "restart"),
        resizes=_count(events, "resize"),
        wall_s=round(wall_s, 3),
        effective_s=round(effective_s, 3),
        effective_training_time_ratio=round(min(1.0, effective_s / wall_s), 4) if wall_s > 0 else None,
        mean_detection_s=_mean(_figures(events, "failure", "detection_s")),
        mean_recovery_s=_mean(recoveries),
        max_recovery_s=max(recoveries, default=None),
        cold_start_s=_mean(_figures(events, "first_step", "recovery_s")),
        recomputed_steps=read_chain(folder.ledger).redone if folder.ledger.exists() else 0,
        saves=len(saves),
        save_stall_s=_mean(stalls),
    )


def account_rows(account: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of an account as `to_json` gives it, for a person."""
    rows = []
    if account.get("failures"):
        rows.append(("failures", f"{count(account['failures'])}, {plural(int(account.get('restarts') or 0), 'restart')}"))
    if account.get("resizes"):
        rows.append(("resizes", count(account["resizes"])))
    if account.get("mean_detection_s") is not None:
        rows.append(("found after (mean)", duration(account["mean_detection_s"])))
    if account.get("mean_recovery_s") is not None:
        rows.append(("training again after (mean)", duration(account["mean_recovery_s"])))
    rows.append(("steps made again", count(account.get("recomputed_steps") or 0)))
    if account.get("effective_training_time_ratio") is not None:
        rows.append(("effective training time", share(account["effective_training_time_ratio"])))
    return rows


def _sessions(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The supervisor's rows by start of the program: where its clock goes back, another one has begun."""
    sessions: list[list[Mapping[str, Any]]] = []
    for row in rows:
        if not sessions or float(row["elapsed_s"]) < float(sessions[-1][-1]["elapsed_s"]):
            sessions.append([])
        sessions[-1].append(row)
    return sessions


def _count(events: Iterable[Mapping[str, Any]], kind: str) -> int:
    return sum(row.get("event") == kind for row in events)


def _figures(events: Iterable[Mapping[str, Any]], kind: str, name: str) -> list[float]:
    return [float(row[name]) for row in events if row.get("event") == kind and row.get(name) is not None]


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None
