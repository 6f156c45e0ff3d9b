"""Numbers that go wrong: what is not finite, what is far off, replicas that differ; and what is done about each.

All ranks call everything here, and decide alike: they have the same report of every step. What is decided depends on nothing
but the steps and the policy, so a run that is killed and resumed decides the same again.
"""

from __future__ import annotations

import math
from collections import Counter

from fleetune.spec.errors import UserError
from fleetune.spec.records import StepBatch, StepReport
from fleetune.training.progress import Progress, Run, event
from fleetune.training.spikes import find_spike, log_norm, remember

#: So many steps in a row without an update end the run.
MAX_SKIPPED_STEPS = 20
#: So many rewinds within so many steps; the next one ends the run.
MAX_REWINDS, REWIND_SPAN = 3, 200
#: So often may replicas differ; then a machine computes wrong numbers.
MAX_REPLICA_FAULTS = 3


def not_trained() -> StepReport:
    """The report of a step that is left out: no loss was computed, nothing was updated."""
    return StepReport(loss=math.nan, gradient_norm=math.nan, trained_tokens=0, tokens=0, applied=False, bytes_sent=0)


def look(run: Run, batch: StepBatch, report: StepReport) -> str | None:
    """Judge the numbers of a step. Returns why the run must go back, or None: go on. Raises UserError where it must end."""
    progress = run.progress
    if report.applied:
        progress.skipped_in_a_row = 0
        return _look_for_spike(run, batch, report)
    progress.skipped_in_a_row += 1
    if report.overflow:
        _give_up_if_skipping(run, batch)
        return None
    step = batch.step + 1
    what = f"the loss is {report.loss}" if not math.isfinite(report.loss) else f"the gradient norm is {report.gradient_norm}"
    cause = f"{what}; {_where(batch, report)}"
    if run.policy.on_nonfinite == "rewind":
        return cause
    if run.policy.on_nonfinite == "stop":
        event(run, "nonfinite", step=step, cause=cause, action="stop")
        raise UserError(
            f"step {step}: {cause}. No update was made, and the last checkpoint stands. Lower --learning-rate, try "
            "--precision fp32, mend the rows, or give --on-nonfinite skip"
        )
    event(run, "skipped", step=step, cause=f"{cause}. No update was made", action="skip")
    _give_up_if_skipping(run, batch)
    return None


def _where(batch: StepBatch, report: StepReport) -> str:
    if report.culprits:
        return "; ".join(report.culprits[:4]) + (f" and {len(report.culprits) - 4} more" if len(report.culprits) > 4 else "")
    rows = ", ".join(batch.samples[:8])
    return f"it is not so when each micro-batch is computed again by itself, so look at the machines too; rows: {rows}"


def _give_up_if_skipping(run: Run, batch: StepBatch) -> None:
    if run.progress.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise UserError(
            f"the loss or the gradients of the last {run.progress.skipped_in_a_row} steps (up to step {batch.step + 1}) were "
            "not finite, so nothing was learned: lower --learning-rate, or try --precision fp32. The last checkpoint stands"
        )


def _look_for_spike(run: Run, batch: StepBatch, report: StepReport) -> str | None:
    progress = run.progress
    spike = find_spike(report.loss, report.gradient_norm, progress.recent_losses, progress.recent_log_norms)
    if spike is not None and run.policy.on_spike == "rewind":
        return spike
    if spike is not None:
        event(run, "spike", step=batch.step + 1, cause=spike, action="ignore")
    remember(progress.recent_losses, report.loss)
    remember(progress.recent_log_norms, log_norm(report.gradient_norm))
    return None


def rewind(run: Run, step: int, cause: str) -> None:
    """Go back to a checkpoint from before the trouble at `step` (from 1), and leave the steps around it out.

    The newest checkpoint that has none of them; where none is old enough, the oldest, and as many steps as come after it.
    Further tries within 200 steps leave twice as many out each. Raises UserError after 3 tries.
    """
    now = run.progress
    tries = 1 + sum(step - REWIND_SPAN < earlier for earlier in now.rewinds)
    if tries > MAX_REWINDS:
        raise UserError(
            f"step {step}: {cause}. The run went back {MAX_REWINDS} times within {REWIND_SPAN} steps, and it came again: lower "
            "--learning-rate, look at the rows of these steps (events.jsonl), or go on with --on-spike ignore and "
            "--on-nonfinite skip"
        )
    first = step - run.policy.skip_window * 2 ** (tries - 1) + 1
    target = go_back(run, before=first)
    first = max(first, target + 1)
    run.progress.rewinds = [*now.rewinds, step]
    run.progress.left_out = [*now.left_out, (first, step, cause)]
    event(run, "rewind", step=step, cause=cause, to_step=target, left_out=[first, step], tries=tries)


def go_back(run: Run, *, before: int) -> int:
    """Load the newest checkpoint of a step below `before`, else the oldest; returns its step. Raises RuntimeError where
    there is none."""
    steps = run.world.broadcast_json(run.checkpoints.all_steps())
    older = [step for step in steps if step < before]
    chosen = max(older) if older else min(steps, default=None)
    checkpoint = None if chosen is None else run.checkpoints.at(chosen)
    if not run.world.max([float(checkpoint is None)])[0] == 0 or checkpoint is None:
        raise RuntimeError("the run must go back, and there is no checkpoint that every rank can read: it starts again")
    run.engine.load(checkpoint.read)
    now, then = run.progress, Progress(**checkpoint.state)
    then.num_steps, then.schedule_steps, then.training_s = now.num_steps, now.schedule_steps, now.training_s
    then.global_batch_size, then.micro_batch_size = now.global_batch_size, now.micro_batch_size
    then.rewinds, then.left_out = now.rewinds, now.left_out
    then.num_saves, then.save_stall_s = now.num_saves, now.save_stall_s
    run.progress = then
    return checkpoint.step


def replicas_differ(run: Run) -> str | None:
    """Compare, bit by bit, what several ranks hold a copy of. Returns None where all agree, else who does not, in words."""
    if run.world.world_size == 1:
        return None
    told = run.world.gather_json([*run.engine.replica(), run.world.node])
    groups: dict[str, list[tuple[int, str]]] = {}
    for rank, (copy_of, bits, _) in enumerate(told):
        groups.setdefault(copy_of, []).append((rank, bits))
    blamed = [text for group in groups.values() if (text := _deviating(group, [node for _, _, node in told])) is not None]
    return "; ".join(blamed) or None


def _deviating(group: list[tuple[int, str]], nodes: list[int]) -> str | None:
    counts = Counter(bits for _, bits in group)
    if len(counts) == 1:
        return None
    (most, number), *_ = counts.most_common()
    if 2 * number <= len(group):
        ranks = ", ".join(f"{rank} (node {nodes[rank]})" for rank, _ in group)
        return (
            f"the weights or optimizer states of the ranks {ranks} differ, and there is no majority that tells which is wrong"
        )
    others = ", ".join(f"rank {rank} (node {nodes[rank]})" for rank, bits in group if bits != most)
    return f"{others} differs from the other {number} replicas in its weights or optimizer state: a bit was flipped there"


def restore_replicas(run: Run, step: int, cause: str) -> None:
    """Go back to the last checkpoint, before which the replicas were equal, and do the steps again: nothing is left out.

    Raises UserError the third time, RuntimeError (the run is started again) where there is no checkpoint yet.
    """
    run.replica_faults += 1
    if run.replica_faults >= MAX_REPLICA_FAULTS:
        event(run, "replica_differs", step=step, cause=cause, action="stop")
        raise UserError(
            f"step {step}: {cause}, for the {run.replica_faults}rd time: take that machine out and go on with --resume. If the "
            "machines have different processors, whose last bits may differ by nature, give --check-replicas-every 0"
        )
    event(run, "replica_differs", step=step, cause=cause, action="rewind")
    target = go_back(run, before=step + 1)
    event(run, "rewind", step=step, cause=cause, to_step=target, left_out=[])
