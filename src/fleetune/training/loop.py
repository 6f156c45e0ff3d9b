"""The training loop. It reads on one page, and never names a parallelism."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fleetune.launch.pulse import Pulse
from fleetune.monitor.monitor import Monitor
from fleetune.parallel.engine import Engine
from fleetune.parallel.world import World
from fleetune.spec.errors import Preempted, UserError
from fleetune.spec.records import StepBatch, StepReport
from fleetune.training.assess import Stopped, perplexity

if TYPE_CHECKING:
    from fleetune.checkpoint.store import CheckpointStore
    from fleetune.training.spread import SpreadCheckpoints

#: So many steps in a row without an update (an fp16 loss scale that finds no footing) end the run.
MAX_SKIPPED_STEPS = 20


class Evaluation(Protocol):
    """Held-out loss over all ranks; None where there are no held-out rows. Raises StopAsked between its batches."""

    def __call__(self) -> tuple[float, int] | None: ...


@dataclass
class Progress:
    """What the loop knows beside the engine's tensors; saved in every checkpoint, by name."""

    step: int = 0
    next_sequence: int = 0
    num_steps: int = 0
    schedule_steps: int = 0
    global_batch_size: int = 0
    micro_batch_size: int = 0
    trained_tokens: int = 0
    tokens: int = 0
    training_s: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None
    evaluations_without_better: int = 0
    last_evaluated: int | None = None
    before: dict[str, Any] | None = None


@dataclass(frozen=True)
class Cadence:
    """When the loop saves, evaluates and gives up; in steps and evaluations, 0 is never."""

    checkpoint_every: int
    evaluate_every: int
    early_stop: int


@dataclass
class Run:
    """The parts of one run on one rank. `peak_memory` in bytes, of this rank."""

    world: World
    engine: Engine
    monitor: Monitor | None
    checkpoints: CheckpointStore | SpreadCheckpoints
    schedule: Callable[[int], float]
    cadence: Cadence
    evaluate: Evaluation
    stop_requested: Callable[[], bool]
    peak_memory: Callable[[], int]
    progress: Progress = field(default_factory=Progress)
    pulse: Pulse = field(default_factory=Pulse)
    skipped: int = 0


def train(run: Run, batches: Iterable[StepBatch]) -> None:
    """Run the steps of `batches` to the end of the run. All ranks. Raises Preempted after saving when asked to stop."""
    progress = run.progress
    started = time.monotonic() - progress.training_s
    for batch in batches:
        began = time.monotonic()
        run.pulse.at("step", batch.step + 1)
        learning_rate = run.schedule(batch.step)
        report = run.engine.step(batch.micro_batches, learning_rate)
        check_numbers(run, batch, report)
        advance(progress, batch, report)
        progress.training_s = time.monotonic() - started
        stop = record(run, batch, report, learning_rate, time.monotonic() - began)
        run.pulse.step_done()
        is_last = progress.step >= progress.num_steps
        if not stop and due(progress.step, run.cadence.evaluate_every, is_last):
            paused = time.monotonic()
            stop = evaluate(run)
            started += time.monotonic() - paused
        enough = given_up(run)
        is_best = progress.best_step == progress.step
        if stop or is_last or enough or is_best or due(progress.step, run.cadence.checkpoint_every):
            save(run)
        if stop:
            raise Preempted(f"asked to stop: saved after step {progress.step}; go on with --resume")
        if enough:
            event(run, "early_stop", step=progress.step, best_step=progress.best_step, best_loss=progress.best_loss)
            return


def due(step: int, every: int, is_last: bool = False) -> bool:
    """Whether something that happens every so many steps (0: never) happens after step number `step` (1-based)."""
    return every > 0 and (is_last or step % every == 0)


def advance(progress: Progress, batch: StepBatch, report: StepReport) -> None:
    progress.step = batch.step + 1
    progress.next_sequence = batch.next_sequence
    progress.trained_tokens += report.trained_tokens
    progress.tokens += report.tokens


def check_numbers(run: Run, batch: StepBatch, report: StepReport) -> None:
    """A loss that is not finite ends the run at once: the update was not applied, the last checkpoint stands."""
    if not math.isfinite(report.loss):
        raise UserError(
            f"the loss of step {batch.step + 1} is {report.loss}: no update was made, and the last checkpoint stands. Lower "
            f"--learning-rate, or try --precision fp32. Rows of the step: {', '.join(batch.samples[:8])}"
        )
    run.skipped = 0 if report.applied else run.skipped + 1
    if run.skipped >= MAX_SKIPPED_STEPS:
        raise UserError(
            f"the gradients of the last {run.skipped} steps (up to step {batch.step + 1}) were not finite, so nothing was "
            "learned: lower --learning-rate, or try --precision fp32"
        )


def record(run: Run, batch: StepBatch, report: StepReport, learning_rate: float, step_s: float) -> bool:
    """Write the step down (rank 0; files count steps from 1). Returns whether any rank was asked to stop."""
    stop, peak_memory_bytes, data_wait_s = run.world.max([float(run.stop_requested()), run.peak_memory(), batch.data_wait_s])
    if run.monitor is not None:
        seconds = step_s + batch.data_wait_s
        run.monitor.record(
            {
                "step": batch.step + 1,
                "loss": report.loss,
                "gradient_norm": report.gradient_norm,
                "learning_rate": learning_rate,
                "tokens": report.tokens,
                "trained_tokens": report.trained_tokens,
                "tokens_per_s": report.tokens / seconds if seconds > 0 else 0.0,
                "step_s": step_s,
                "data_wait_s": data_wait_s,
                "bytes_sent": report.bytes_sent,
                "peak_memory_bytes": int(peak_memory_bytes),
                "applied": report.applied,
            }
        )
        run.monitor.commit(
            {
                "step": batch.step + 1,
                "samples": list(batch.samples),
                "trained_tokens": report.trained_tokens,
                "loss_hex": float(report.loss).hex(),
                "gradient_norm_hex": float(report.gradient_norm).hex(),
                "applied": report.applied,
            }
        )
    return bool(stop)


def evaluate(run: Run) -> bool:
    """Held-out loss now; remembers the best. Returns whether somebody was asked to stop meanwhile."""
    progress = run.progress
    run.pulse.at("evaluate")
    try:
        result = run.evaluate()
    except Stopped:
        return True
    if result is None:
        return False
    loss, _ = result
    progress.last_evaluated = progress.step
    if progress.best_loss is None or loss < progress.best_loss:
        progress.best_loss, progress.best_step, progress.evaluations_without_better = loss, progress.step, 0
    else:
        progress.evaluations_without_better += 1
    if run.monitor is not None:
        run.monitor.validation(progress.step, loss, perplexity(loss))
    return False


def given_up(run: Run) -> bool:
    return 0 < run.cadence.early_stop <= run.progress.evaluations_without_better


def save(run: Run) -> None:
    """Save a complete checkpoint. A failed save is told and training goes on: the older checkpoint stands."""
    progress = run.progress
    run.pulse.at("save")
    if run.monitor is not None:
        run.monitor.flush()
    best = progress.best_step is not None and progress.best_step == progress.step
    report = run.checkpoints.save(progress.step, run.engine.shards(), asdict(progress), best=best)
    if report.error:
        event(run, "save_failed", step=progress.step, cause=report.error)
    else:
        event(run, "save", step=progress.step, bytes=report.bytes, seconds=report.seconds, best=best)
    run.pulse.at("data")


def event(run: Run, kind: str, **fields: Any) -> None:
    if run.monitor is not None:
        run.monitor.event(kind, **fields)
