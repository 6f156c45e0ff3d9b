"""The end of a run: the best weights, the result folder, what they are worth, and the summary."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.spec.run_folder import read_lines, write_json
from fleetune.training.answers import Reply
from fleetune.training.assess import Stopped
from fleetune.training.build import Parts
from fleetune.training.result import check_saved, published
from fleetune.training.saving import save, settle

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel

_log = logging.getLogger(__name__)


def finish(parts: Parts) -> None:
    """Write the result and the summary. All ranks."""
    run = parts.run
    settle(run)
    if run.progress.step not in run.checkpoints.all_steps():
        save(run)
    chosen = choose_best(parts)
    folder = write_result(parts)
    after, replies = assess(parts)
    if run.monitor is not None:
        write_summary(parts, folder, chosen, after, replies)
        run.monitor.event("done", step=run.progress.step, result=str(folder))


def assess(parts: Parts) -> tuple[dict[str, Any] | None, list[Reply]]:
    if parts.held_out is None:
        return None, []
    try:
        return parts.held_out.assess().to_json(), parts.held_out.replies
    except Stopped:
        _log.warning("asked to stop during the last evaluation: the result is written, its figures are not")
        return None, []


def choose_best(parts: Parts) -> int:
    """Bring back the weights of the best held-out loss when they are not the last ones; returns their step."""
    progress = parts.run.progress
    best = progress.best_step
    if best is None or best == progress.step:
        return progress.step
    checkpoint = parts.run.checkpoints.at(best)
    if checkpoint is None:
        _log.warning("the best checkpoint (step %d) cannot be read: the result is that of the last step", best)
        return progress.step
    parts.run.engine.load(checkpoint.read)
    return best


def write_result(parts: Parts) -> Path:
    """The adapter or the model, from the engine's full tensors. All ranks take part, rank 0 writes."""
    is_adapter = parts.spec.adaptation.method == "lora"
    folder = parts.folder.adapter if is_adapter else parts.folder.model
    tensors = parts.run.engine.full_tensors()
    if parts.run.monitor is None:
        for _ in tensors:
            pass
    else:
        with published(folder) as temporary:
            names = parts.model.save(tensors, temporary, base_model=parts.base_model_name())
            check_saved(temporary, names)
            tokenizer_to_publish(parts).save_pretrained(temporary)
    parts.run.world.barrier()
    return folder


def tokenizer_to_publish(parts: Parts) -> Any:
    """The tokenizer with the template that the rows were written with: a model without one of its own needs it from now on."""
    from fleetune.data.encode import Encoder

    tokenizer = parts.tokenizer
    if tokenizer.chat_template is None and parts.prepared.has_conversations:
        tokenizer.chat_template = Encoder(tokenizer).plain_template()
    return tokenizer


def write_summary(parts: Parts, folder: Path, step: int, after: dict[str, Any] | None, replies: list[Reply]) -> None:
    run = parts.run
    peak = max((row.get("peak_memory_bytes") or 0 for row in read_lines(parts.folder.metrics)), default=0)
    write_json(
        parts.folder.summary,
        {
            "before": run.progress.before,
            "after": after,
            "replies": pair_replies(parts.replies_before(), replies),
            "steps": run.progress.step,
            "result_step": step,
            "training_s": run.progress.training_s,
            "trained_tokens": run.progress.trained_tokens,
            "tokens": run.progress.tokens,
            "peak_memory_bytes": peak,
            "saves": run.progress.num_saves,
            "save_stall_s": run.progress.save_stall_s,
            "result": str(folder),
            "model": parts.spec.weights.model,
            "method": parts.spec.adaptation.method,
            "base": base_of(parts.model),
        },
    )


def base_of(model: CausalModel) -> dict[str, Any] | None:
    """How much the quantised base weighs, and what it would weigh unquantised; None where it is not quantised."""
    if model.scheme is None:
        return None
    saved = model.saved_bytes()
    trained = sum(p.numel() * p.element_size() for _, p in model.trained())
    held = model.held_bytes() - trained
    return {"quantize": model.scheme, "precision": model.precision, "bytes": held, "unquantized_bytes": held + saved}


def pair_replies(before: list[dict[str, Any]], after: list[Reply], *, count: int = 2) -> list[dict[str, Any]]:
    """A few held-out rows with what the model said before and after: first those that show a difference."""
    if not after:
        return []
    old = {reply["sample"]: reply["said"] for reply in before}
    rows = [{**asdict(reply), "before": old.get(reply.sample), "after": reply.said, "right": reply.right} for reply in after]
    rows.sort(key=lambda row: (row["before"] is None, row["before"] == row["after"]))
    return [{key: row[key] for key in ("sample", "prompt", "wanted", "before", "after", "right")} for row in rows[:count]]
