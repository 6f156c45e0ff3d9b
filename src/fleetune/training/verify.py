"""`fleetune verify`: proves from the ledger that each sample was trained exactly where the plan has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_lines
from fleetune.training.prepared import Prepared

if TYPE_CHECKING:
    from fleetune.data.plan import SamplePlan
    from fleetune.monitor.ledger import Check, Comparison


def verify_run(run: str, *, against: str | None = None) -> Check | Comparison:
    """Hold a run's ledger against another run's, or against its own plan. Raises UserError for what is no run."""
    from fleetune.monitor.ledger import check, compare

    folder = ledger_of(run)
    if against is not None:
        return compare(folder, ledger_of(against))
    steps = planned(folder)
    return check(folder) if steps is None else check(folder, expected=steps[0], num_steps=steps[1])


def ledger_of(run: str) -> RunFolder:
    folder = RunFolder(Path(run))
    if not folder.ledger.exists():
        raise UserError(f"{run} has no ledger.jsonl: give the folder of a run that has trained (runs/...)")
    return folder


def planned(folder: RunFolder) -> tuple[Callable[[int], Sequence[str]], int] | None:
    """(sample ids of a step, counted from 1; steps of a finished run, else 0), or None without the rows.

    The order of the samples is made anew from the prepared rows and the seed, and where each start of the run goes on is
    worked out from the one before: the plan owes nothing to the ledger. Of a start only what it was asked is taken. Raises
    UserError where the first start is missing.
    """
    from fleetune.data.plan import SamplePlan
    from fleetune.data.store import TokenStore
    from fleetune.spec.read import read_run

    starts = [row for row in read_lines(folder.events) if row.get("event") == "start" and "last_position" in row]
    if not starts or not folder.prepared.exists():
        return None
    store = TokenStore.open(Path(Prepared.read(folder).store))
    if int(starts[0]["from_step"]) > 0:
        raise UserError(
            f"{folder.events} does not tell how the run began (its first start goes on from step {starts[0]['from_step']}), so "
            "its plan cannot be made anew: bring the whole file back, or give --against RUN"
        )
    seed = read_run(folder).spec.optimization.seed
    plans: list[SamplePlan] = []
    for row in starts:
        first = int(row["from_step"])
        position = plan_of_step(plans, first - 1).next_position(first - 1) if first else 0
        size, num_steps, last = (int(row[name]) for name in ("global_batch_size", "num_steps", "last_position"))
        plans.append(SamplePlan(store.num_sequences, seed, size, num_steps, last, first, position))

    def expected(step: int) -> Sequence[str]:
        return store.sample_ids(plan_of_step(plans, step - 1).step(step - 1))

    return expected, plans[-1].num_steps if folder.summary.exists() else 0


def plan_of_step(plans: Sequence[SamplePlan], step: int) -> SamplePlan:
    """The plan by which `step` (0-based) was done last: that of the latest start that did not begin behind it."""
    return next(plan for plan in reversed(plans) if plan.first_step <= step)
