"""Proof from the ledger: which samples were trained in which step, and with what loss.

The ledger is append-only. What counts is the chain of steps that led to the final weights: an attempt that goes on from a
checkpoint replaces what the earlier ones did from there on, also the steps that it never reached itself.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.monitor.figures import plural
from fleetune.spec.run_folder import RunFolder, read_lines

LedgerRow = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One run against another.

    lost, repeated: samples that the other run trained more or less often than this one, over the whole run. moved: samples that
    are in another step, or in another place within their step (0 where lost or repeated is not). bitwise: whether the losses
    of all common steps are equal to the last bit. first_difference_step: the first step whose loss differs.
    """

    lost: int
    repeated: int
    moved: int
    num_common_steps: int
    bitwise: bool
    max_relative_difference: float
    first_difference_step: int | None

    @property
    def holds(self) -> bool:
        """Every sample was trained as often, and in the same step, as in the other run."""
        return self.lost == 0 and self.repeated == 0 and self.moved == 0

    def text(self) -> str:
        moved = f", moved {self.moved}" if self.moved else ""
        if not self.num_common_steps:
            losses = "no common step"
        elif self.bitwise:
            losses = "losses bitwise"
        else:
            losses = f"max relative difference {self.max_relative_difference:.3g} (first in step {self.first_difference_step})"
        return f"lost {self.lost}, repeated {self.repeated}{moved}, {losses}"


@dataclass(frozen=True)
class Check:
    """One run by itself. problems: what is wrong, for a person; empty where everything holds.

    num_skipped_steps: committed without an update (a non-finite value, left out after a rewind): in their place in the plan,
    so neither lost nor repeated, and not trained on.
    """

    lost: int
    repeated: int
    num_steps: int
    num_attempts: int
    num_redone_steps: int
    num_skipped_steps: int
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.problems

    def text(self) -> str:
        steps, attempts = plural(self.num_steps, "step"), plural(self.num_attempts, "attempt")
        said = f"lost {self.lost}, repeated {self.repeated}, {steps} in {attempts}"
        redone = f", {self.num_redone_steps} done again" if self.num_redone_steps else ""
        skipped = f", {plural(self.num_skipped_steps, 'step')} without an update" if self.num_skipped_steps else ""
        return "\n".join([said + redone + skipped, *self.problems])


@dataclass(frozen=True)
class Chain:
    """The committed steps of a run, in order. redone: rows that a later attempt replaced."""

    rows: dict[int, LedgerRow]
    num_attempts: int
    redone: int
    problems: tuple[str, ...]


def read_chain(path: Path) -> Chain:
    """The chain of committed steps in a `ledger.jsonl`. Rows that are no ledger rows are left out and told."""
    chain: list[tuple[int, LedgerRow]] = []
    attempts: set[int] = set()
    redone, strange = 0, 0
    for row in read_lines(path):
        step, attempt = row.get("step"), row.get("attempt")
        if type(step) is not int or type(attempt) is not int or not _is_whole(row):
            strange += 1
            continue
        if attempts and attempt < max(attempts):
            strange += 1  # an attempt that another had already replaced: it had no right to write
            continue
        attempts.add(attempt)
        while chain and chain[-1][0] >= step:
            chain.pop()
            redone += 1
        chain.append((step, row))
    problems = [f"{path} has {strange} rows that are damaged or come from an attempt already replaced"] if strange else []
    return Chain(dict(chain), len(attempts), redone, tuple(problems))


def compare(run: RunFolder, against: RunFolder) -> Comparison:
    """What `run` did, measured by what `against` (an undisturbed run, say) did. A step without an update trained nothing."""
    mine, theirs = read_chain(run.ledger).rows, read_chain(against.ledger).rows
    lost, repeated, moved = _compare_samples(_samples(mine, trained=True), _samples(theirs, trained=True))
    common = {step: (_loss(mine[step]), _loss(theirs[step])) for step in mine if step in theirs}
    different = {step: _relative(*pair) for step, pair in common.items() if not _same_bits(*pair)}
    return Comparison(
        lost=lost,
        repeated=repeated,
        moved=moved,
        num_common_steps=len(common),
        bitwise=bool(common) and not different,
        max_relative_difference=max(different.values(), default=0.0),
        first_difference_step=min(different, default=None),
    )


def check(
    run: RunFolder,
    *,
    expected: Callable[[int], Sequence[str]] | None = None,
    num_steps: int | None = None,
    samples_per_epoch: int | None = None,
) -> Check:
    """Whether a run's own ledger holds: its steps follow each other from 1, and no sample comes again within an epoch.

    expected: the sample ids of a step (from 1) by the plan; with it, lost and repeated samples are counted exactly.
    num_steps: steps that the run should have. samples_per_epoch: samples of one epoch; without it, the samples seen.
    """
    chain = read_chain(run.ledger)
    problems = list(chain.problems)
    if not chain.rows:
        problems.append(f"{run.ledger} has no committed step: give a run that has trained, or see its logs")
    last = max(num_steps or 0, max(chain.rows, default=0))
    missing = [step for step in range(1, last + 1) if step not in chain.rows]
    if missing:
        problems.append(f"{len(missing)} steps are missing in the ledger: {_ranges(missing)}")
    if expected is not None:
        planned = {step: list(expected(step)) for step in range(1, last + 1)}
        lost, repeated, moved = _compare_samples(_samples(chain.rows), planned)
        if moved:
            problems.append(f"{moved} samples were not trained in the place that the plan has for them")
    else:
        lost, repeated = 0, _repeated_within_epochs(chain.rows, samples_per_epoch)
    if lost or repeated:
        problems.append(f"{lost} samples were lost and {repeated} were trained again too early")
    skipped = sum(row.get("applied") is False for row in chain.rows.values())
    return Check(lost, repeated, len(chain.rows), chain.num_attempts, chain.redone, skipped, tuple(problems))


def _is_whole(row: LedgerRow) -> bool:
    samples, loss = row.get("samples"), row.get("loss_hex")
    if not isinstance(samples, list) or not all(isinstance(sample, str) for sample in samples) or not isinstance(loss, str):
        return False
    try:
        float.fromhex(loss)
    except ValueError:
        return False
    return True


def _samples(rows: Mapping[int, LedgerRow], *, trained: bool = False) -> dict[int, list[str]]:
    """The samples of each step; with `trained`, only of those that were followed by an update."""
    return {step: row["samples"] for step, row in rows.items() if not trained or row.get("applied") is not False}


def _compare_samples(mine: Mapping[int, Sequence[str]], theirs: Mapping[int, Sequence[str]]) -> tuple[int, int, int]:
    """(lost, repeated, moved) of mine measured by theirs."""
    my_counts = Counter(sample for samples in mine.values() for sample in samples)
    their_counts = Counter(sample for samples in theirs.values() for sample in samples)
    lost, repeated = (their_counts - my_counts).total(), (my_counts - their_counts).total()
    moved = 0
    if not lost and not repeated:
        for step in mine.keys() | theirs.keys():
            here, there = mine.get(step, ()), theirs.get(step, ())
            moved += max(len(here), len(there)) - sum(a == b for a, b in zip(here, there))
    return lost, repeated, moved


def _repeated_within_epochs(rows: Mapping[int, LedgerRow], samples_per_epoch: int | None) -> int:
    """Samples that come again before all samples of the epoch have come."""
    order = [sample for _, row in sorted(rows.items()) for sample in row["samples"]]
    whole = samples_per_epoch or len(set(order))
    seen: set[str] = set()
    repeated = 0
    for sample in order:
        if len(seen) >= whole:
            seen = set()
        repeated += sample in seen
        seen.add(sample)
    return repeated


def _loss(row: LedgerRow) -> float:
    return float.fromhex(row["loss_hex"])


def _same_bits(a: float, b: float) -> bool:
    return struct.pack("<d", a) == struct.pack("<d", b)


def _relative(a: float, b: float) -> float:
    """|a - b| / max(|a|, |b|); infinite where one of them is no number."""
    if a == b:
        return 0.0
    if not math.isfinite(a) or not math.isfinite(b):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def _ranges(steps: Sequence[int]) -> str:
    """`3, 7 to 9` of [3, 7, 8, 9]; at most five of them."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    said = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    return ", ".join(said[:5]) + (", ..." if len(said) > 5 else "")
