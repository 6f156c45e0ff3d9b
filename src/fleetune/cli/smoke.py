"""`fleetune train --smoke`: the whole way of a run in about a minute, on its own model, rows and processes.

The longest batch of the rows comes first, so that what does not fit into memory fails here; then an evaluation, a save, a
resume in new processes, and an export that is checked.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.cli.intent import Intent, planned
from fleetune.cli.machines import find_machines
from fleetune.cli.start import Finished, start
from fleetune.planning.plan import Plan
from fleetune.spec.errors import EXIT_DONE, EXIT_PREEMPTED, UserError
from fleetune.spec.run_folder import RunFolder, effective_rows, read_json, read_lines

if TYPE_CHECKING:
    from fleetune.training.export import ExportReport

#: Steps before the resume, and in all.
_STEPS, _MORE_STEPS = 2, 3
#: Micro-batches of a data rank in a step: two show the accumulation, more only take longer.
_MICRO_BATCHES = 2
#: What would leave traces elsewhere, or end the trial early.
_OFF = {"wandb": False, "mlflow": False, "early_stop": 0}


@dataclasses.dataclass(frozen=True)
class Trial:
    """What was tried, with figures; exit_code: 0 where all of it works. rows: (what, how it went) for a person."""

    exit_code: int
    figures: dict[str, Any]
    rows: list[tuple[str, str]]


def refuse(intent: Intent, what: str) -> None:
    """Raises UserError where smoke is asked for in a place that does not try anything."""
    if intent.spec.output.smoke:
        intent.close()
        raise UserError(refusal(what))


def refusal(what: str) -> str:
    return f"smoke is of the command fleetune train, and {what} cannot try a run out: leave it out"


def smoke(intent: Intent, *, tell: Callable[[str], None]) -> Trial:
    """Try the run out beside the place where it would live. Raises UserError, or CheckFailed of the export.

    The trial's folder is removed where all went well, and stays for its logs where something broke.
    """
    began = time.monotonic()
    folder = RunFolder(intent.folder.path.with_name(f"{intent.folder.path.name}.smoke-{secrets.token_hex(3)}"))
    made = [place for place in folder.path.parents if not place.exists()]
    for steps in (_STEPS, _MORE_STEPS):
        finished = start(_shortened(intent, folder, steps), tell=tell)
        if finished.exit_code != EXIT_DONE:
            if finished.exit_code == EXIT_PREEMPTED:
                _remove(folder, made)
            return Trial(finished.exit_code, {}, [])
    report = _exported(intent, finished)
    trial = _told(folder, report, time.monotonic() - began)
    _remove(folder, made)
    return trial


def _remove(folder: RunFolder, made: list[Path]) -> None:
    """Take the trial's folder back, and those around it that were made for it, where nothing else lies in them."""
    shutil.rmtree(folder.path)
    for place in made:
        with suppress(OSError):
            place.rmdir()


def _shortened(intent: Intent, folder: RunFolder, steps: int) -> Intent:
    """The same run, of so many small steps; the second time its machines are reached anew."""
    batches, layout = intent.plan.batches, intent.plan.layout
    enough = max(_MICRO_BATCHES, layout.pipeline)  # every stage of a pipeline has work
    accumulation = min(enough, batches.gradient_accumulation_steps or enough)
    values = {
        **_OFF,
        "run": str(folder.path),
        "resume": steps > _STEPS,
        "max_steps": steps,
        "schedule_steps": None,
        "checkpoint_every": 0,
        "evaluate_every": 1 if _has_held_out(intent) else 0,
        "micro_batch_size": batches.micro_batch_size,
        "global_batch_size": batches.micro_batch_size * accumulation * layout.data_ranks,
        "gradient_accumulation_steps": None,
        "json_output": False,
    }
    resolved = intent.resolved.with_values(values)
    plan: Plan = planned(resolved.spec, intent.located, layout, intent.device)
    fleet = intent.fleet
    if fleet is not None and steps > _STEPS:
        fleet = find_machines(resolved.spec, folder.path, is_start=True).fleet
    return dataclasses.replace(intent, resolved=resolved, plan=plan, folder=folder, fleet=fleet)


def _has_held_out(intent: Intent) -> bool:
    return bool(intent.spec.rows.validation or intent.spec.rows.validation_share)


def _exported(intent: Intent, finished: Finished) -> ExportReport:
    """An adapter as one, which is small; a fully trained model as the model."""
    from fleetune.training.export import export_run

    return export_run(str(finished.folder.path), to="merged" if intent.spec.adaptation.method == "full" else "adapter")


def _told(folder: RunFolder, report: ExportReport, seconds: float) -> Trial:
    """What the trial's files say of each part."""
    events = list(read_lines(folder.events))
    steps = effective_rows(folder.metrics)
    validations = [row for row in read_lines(folder.metrics) if "validation_loss" in row]
    saves = [row for row in events if row["event"] == "save"]
    resumed = [row for row in events if row["event"] == "start" and row.get("from_step")]
    shrunk = [row for row in events if row["event"] == "out_of_memory"]
    tokens = [row["tokens"] for row in steps.values()]
    peak = max((row["peak_memory_bytes"] or 0 for row in steps.values()), default=0)
    figures: dict[str, Any] = {
        "steps": len(steps),
        "tokens": tokens,
        "step_s": [row["step_s"] for row in steps.values()],
        "peak_memory_bytes": peak,
        "micro_batch_size": shrunk[-1]["micro_batch_size"] if shrunk else read_json(folder.plan)["micro_batch_size"],
        "out_of_memory": len(shrunk),
        "validation_loss": validations[-1]["validation_loss"] if validations else None,
        "save_bytes": saves[-1]["bytes"],
        "save_s": saves[-1]["seconds"],
        "resumed_from_step": resumed[-1]["from_step"],
        "export": report.kind,
        "divergence": report.divergence,
        "seconds": seconds,
    }
    evaluated = f"loss {figures['validation_loss']:.4f}" if validations else "not tried: there are no held-out rows"
    rows = [
        ("longest batch", f"{max(tokens)} tokens in {max(figures['step_s']):.1f} s, {peak / 1e9:.2f} GB at most"),
        *([("memory", f"a micro-batch of {figures['micro_batch_size']} fits, a larger one did not")] if shrunk else []),
        ("evaluation", evaluated),
        ("save", f"{figures['save_bytes'] / 1e6:.1f} MB in {figures['save_s']:.2f} s"),
        ("resume", f"from step {figures['resumed_from_step']}, in new processes"),
        ("export", f"{report.kind}, checked with {report.checked_with}: {report.divergence:.2g} nats a token"),
        ("in all", f"{seconds:.0f} s; nothing was kept. The same command without --smoke trains"),
    ]
    return Trial(EXIT_DONE, figures, rows)
