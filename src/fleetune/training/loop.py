"""The training loop. It reads on one page, and never names a parallelism."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from fleetune.monitor.memory import return_free_memory
from fleetune.parallel.out_of_memory import OutOfMemory
from fleetune.spec.errors import Preempted
from fleetune.spec.records import StepBatch, StepReport
from fleetune.training.assess import Stopped, perplexity
from fleetune.training.numbers import look, not_trained, replicas_differ, restore_replicas, rewind
from fleetune.training.progress import Progress, Run, event
from fleetune.training.room import take_smaller
from fleetune.training.saving import is_due, may_begin, save, settle


def train(run: Run, batches: Callable[[], Iterator[StepBatch]]) -> None:
    """Run the steps to the end of the run. All ranks. Raises Preempted after saving when asked to stop.

    batches: gives the steps from where the run stands; asked again when the run goes back.
    """
    if run.policy.may_rewind and run.progress.step == 0:
        save(run, wait=False)  # there must be something to go back to
    while not went_through(run, batches()):
        pass


def went_through(run: Run, batches: Iterator[StepBatch]) -> bool:
    """Run the steps of `batches`; False where the run went back, and must go on from where it stands now."""
    started = time.monotonic() - run.progress.training_s
    for batch in batches:
        began, progress = time.monotonic(), run.progress
        run.pulse.at("step", batch.step + 1)
        learning_rate = run.schedule(batch.step)
        left_out = progress.why_left_out(batch.step + 1)
        try:
            report = run.engine.step(batch.micro_batches, learning_rate) if left_out is None else not_trained()
        except OutOfMemory as short:
            take_smaller(run, batch.step + 1, str(short))
            return False
        trouble = look(run, batch, report) if left_out is None else None
        if trouble is not None:
            settle(run)
            rewind(run, batch.step + 1, trouble)
            return False
        advance(progress, batch, report)
        return_free_memory()
        progress.training_s = time.monotonic() - started
        stop, is_writing, since_save_s = record(run, batch, report, learning_rate, time.monotonic() - began)
        run.pulse.step_done()
        if not is_writing:
            settle(run)
        is_last = progress.step >= progress.num_steps
        if not stop and due(progress.step, run.cadence.evaluate_every, is_last):
            paused = time.monotonic()
            stop = evaluate(run)
            started += time.monotonic() - paused
        enough = given_up(run)
        must_save = stop or is_last or enough
        saves_now = must_save or progress.best_step == progress.step or (is_due(run, since_save_s) and may_begin(run))
        if run.cadence.check_replicas_every and (saves_now or due(progress.step, run.cadence.check_replicas_every)):
            difference = replicas_differ(run)
            if difference is not None:
                settle(run)
                restore_replicas(run, progress.step, difference)
                return False
        if saves_now:
            save(run, wait=must_save)
        if stop:
            raise Preempted(f"asked to stop: saved after step {progress.step}; go on with --resume")
        if enough:
            event(run, "early_stop", step=progress.step, best_step=progress.best_step, best_loss=progress.best_loss)
            return True
    return True


def due(step: int, every: int, is_last: bool = False) -> bool:
    """Whether something that happens every so many steps (0: never) happens after step number `step` (1-based)."""
    return every > 0 and (is_last or step % every == 0)


def advance(progress: Progress, batch: StepBatch, report: StepReport) -> None:
    progress.step = batch.step + 1
    progress.next_sequence = batch.next_sequence
    progress.trained_tokens += report.trained_tokens
    progress.tokens += report.tokens


def record(run: Run, batch: StepBatch, report: StepReport, learning_rate: float, step_s: float) -> tuple[bool, bool, float]:
    """Write the step down (rank 0; files count steps from 1).

    Returns what all ranks must agree on: whether any was asked to stop, whether any still writes a checkpoint, and the seconds
    since the last save began.
    """
    saves = run.saves
    mine = [float(run.stop_requested()), float(saves.saver.busy), saves.since_s, run.peak_memory(), batch.data_wait_s]
    stop, is_writing, since_save_s, peak_memory_bytes, data_wait_s = run.world.max(mine)
    if run.monitor is not None:
        seconds = step_s + batch.data_wait_s
        left_out = run.progress.why_left_out(batch.step + 1)
        not_made = {} if left_out is None else {"left_out": left_out}
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
                **not_made,
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
                **not_made,
            }
        )
    return bool(stop), bool(is_writing), since_save_s


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
