"""`fleetune verify`: proves from the ledger that each sample was trained exactly where the plan has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_lines
from fleetune.training.prepared import Prepared

if TYPE_CHECKING:
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
    """(sample ids of a step, counted from 1; steps of a finished run, else those so far), or None without the rows.

    The plan is made anew from the prepared rows and the seed: it owes nothing to what the run wrote down.
    """
    from fleetune.data.plan import plan_run
    from fleetune.data.store import TokenStore
    from fleetune.spec.read import read_run

    starts = [row for row in read_lines(folder.events) if row.get("event") == "start" and "global_batch_size" in row]
    if not starts or not folder.prepared.exists():
        return None
    store = TokenStore.open(Path(Prepared.read(folder).store))
    optimization = read_run(folder).spec.optimization
    plan = plan_run(
        store.num_sequences,
        seed=optimization.seed,
        global_batch_size=starts[0]["global_batch_size"],
        epochs=optimization.epochs,
        max_steps=optimization.max_steps,
    )
    finished = folder.summary.exists()
    return (lambda step: store.sample_ids(plan.step(step - 1))), plan.num_steps if finished else 0
