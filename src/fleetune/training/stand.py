"""Where a run stands: from its last complete checkpoint, or from the beginning, with the plan of what is left."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fleetune.spec.batches import Batches, divide
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.run_spec import RunSpec
from fleetune.training.progress import Progress, event
from fleetune.training.rehearsal import rehearse
from fleetune.training.room import kills, tell
from fleetune.training.schedules import DEFAULT_LEARNING_RATE, Schedule

if TYPE_CHECKING:
    from fleetune.data.plan import SamplePlan
    from fleetune.training.build import Parts


def go_on(parts: Parts) -> None:
    """Restore the last complete checkpoint, if there is one, and open what records the run. All ranks.

    The ranks agree on rank 0's choice: a checkpoint that only some of them can read is an error, never two histories.
    """
    run = parts.run
    checkpoint = run.checkpoints.latest()
    steps = run.world.gather_json(checkpoint.step if checkpoint else None)
    if len(set(steps)) > 1:
        raise UserError(f"the ranks find different checkpoints in {parts.folder.checkpoints} (steps {steps}): share the folder")
    if checkpoint is not None:
        raise_if_any([f"{text}: start a new run with --run" for text in run.checkpoints.mismatches(checkpoint)])
        run.progress = Progress(**checkpoint.state)
        run.engine.load(checkpoint.read)
        parts.batches = resumed_batches(parts.spec, run.progress, parts.run.world.data_ranks)
    known = run.room.micro_batch_size
    if known is not None and known != parts.batches.micro_batch_size:
        parts.resize(known)
    parts.plan = plan_of(parts)
    progress = run.progress
    progress.global_batch_size = parts.batches.global_batch_size
    progress.micro_batch_size = parts.batches.micro_batch_size
    progress.num_steps = parts.plan.num_steps
    progress.schedule_steps = parts.spec.optimization.schedule_steps or progress.schedule_steps or progress.num_steps
    run.schedule = schedule_of(parts.spec, progress.schedule_steps)
    open_records(parts)
    for refusal in run.checkpoints.refused:
        event(run, "checkpoint_refused", cause=str(refusal))
    warn_of_space(parts)
    asked = {"from_step": progress.step, "num_steps": progress.num_steps, "last_position": parts.plan.last_position}
    event(run, "start", **asked, **batch_sizes(parts), **sizes(parts), oom_kills=kills())
    if run.room.cause is not None:
        tell(run, run.room, step=progress.step)
    if parts.spec.health.dynamic_batch_size and progress.step == 0:
        rehearse(parts)
    if parts.prepared.validation_store is not None:
        parts.open_validation()


def resumed_batches(spec: RunSpec, progress: Progress, data_ranks: int) -> Batches:
    """The global batch that the run began with, divided over the ranks there are now; unequally where it must be."""
    size = spec.optimization.micro_batch_size or progress.micro_batch_size
    return divide(progress.global_batch_size, min(size, progress.global_batch_size), data_ranks)


def plan_of(parts: Parts) -> SamplePlan:
    from fleetune.data.plan import plan_run

    optimization, progress = parts.spec.optimization, parts.run.progress
    return plan_run(
        parts.store.num_sequences,
        seed=optimization.seed,
        global_batch_size=parts.batches.global_batch_size,
        epochs=optimization.epochs,
        max_steps=optimization.max_steps,
        first_step=progress.step,
        first_position=progress.next_sequence,
        order=parts.store.longest_first() if parts.spec.output.smoke else None,
    )


def batch_sizes(parts: Parts) -> dict[str, Any]:
    """The numbers of a step, resolved: what a person is told at the start."""
    batches, world = parts.batches, parts.run.world
    return {
        "global_batch_size": batches.global_batch_size,
        "micro_batch_size": batches.micro_batch_size,
        "gradient_accumulation_steps": batches.gradient_accumulation_steps,
        "shares": list(batches.shares),
        "world_size": world.world_size,
        "layout": world.layout.to_json(),
        "precision": parts.prepared.precision,
        "quantize": parts.spec.adaptation.quantize,
        "device": str(world.device),
    }


def warn_of_space(parts: Parts) -> None:
    """Say at the start, not at the first failed save, that the disk will not hold the checkpoints."""
    from fleetune.checkpoint.space import space_warning

    held = parts.run.engine.held()
    per_parameter = 4 + held.optimizer_bytes / max(1, held.trained_here)
    warning = space_warning(
        parts.folder.checkpoints,
        checkpoint_bytes=int(held.trained_parameters * per_parameter),
        keep=parts.spec.output.keep_checkpoints,
        keeps_best=parts.spec.output.evaluate_every > 0,
    )
    if warning:
        event(parts.run, "warning", cause=warning)


def sizes(parts: Parts) -> dict[str, Any]:
    """What this rank holds, and under `ranks` where each rank stands in the layout and what it holds. All ranks.

    loading_bytes: the most memory that loading has taken (without mapped files), above what the process had before.
    """
    world, held = parts.run.world, parts.run.engine.held()
    mine = {"rank": world.rank, "node": world.node, "layout": asdict(world.coordinates)}
    mine |= {"parameter_bytes": held.parameter_bytes, "optimizer_bytes": held.optimizer_bytes}
    mine |= {"memory_before_loading": parts.memory_before_loading}
    mine |= {"loading_bytes": parts.run.peak_memory() - parts.memory_before_loading}
    return {
        "parameter_bytes": held.parameter_bytes,
        "trained_parameters": held.trained_parameters,
        "optimizer_bytes": held.optimizer_bytes,
        "ranks": world.gather_json(mine),
    }


def open_records(parts: Parts) -> None:
    """Rank 0 writes the run down."""
    from fleetune.monitor.monitor import Monitor
    from fleetune.monitor.sinks import make_sinks

    if parts.run.world.rank:
        return
    asked = parts.spec.trackers
    trackers = {"tensorboard": asked.tensorboard, "wandb": asked.wandb, "mlflow": asked.mlflow}
    sinks = make_sinks(
        parts.folder,
        [name for name, is_asked in trackers.items() if is_asked],
        first_step=parts.run.progress.step + 1,
        config=parts.spec.flat(),
        offline=parts.spec.weights.offline,
    )
    parts.run.monitor = Monitor(parts.folder, attempt=parts.attempt, sinks=sinks)


def schedule_of(spec: RunSpec, num_steps: int) -> Schedule:
    optimization = spec.optimization
    return Schedule(
        peak=learning_rate_of(spec),
        num_steps=num_steps,
        shape=optimization.schedule,
        warmup=optimization.warmup,
        warmup_steps=optimization.warmup_steps,
        final_share=optimization.final_learning_rate_share,
    )


def learning_rate_of(spec: RunSpec) -> float:
    return spec.optimization.learning_rate or DEFAULT_LEARNING_RATE[spec.adaptation.method]
