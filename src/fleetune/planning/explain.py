"""A plan in words: one line a fact, `what` and `value`."""

from __future__ import annotations

from fleetune.planning.plan import Plan


def explain(plan: Plan) -> list[tuple[str, str]]:
    """(what, value) of everything that the plan knows, for a person."""
    lines = [("model", f"{plan.model_type}, {plan.num_parameters:,} parameters"), ("trained", _trained(plan))]
    if plan.layout.world_size > 1:
        lines.append(("layout", f"{plan.layout.describe()} on {plan.layout.world_size} processes"))
    lines.append(("step", _step(plan)))
    if plan.memory is not None:
        where = "on each rank" if plan.layout.pipeline == 1 else "on the rank of the largest stage"
        memory, up_to = (
            plan.memory,
            "at most " if (plan.precision == "auto" and plan.memory.frozen_bytes) or plan.layout.tensor > 1 else "",
        )
        lines += [
            ("parameters", f"{up_to}{_size(memory.parameter_bytes)} {where}{_frozen(plan)}"),
            *_base(plan),
            ("gradients", f"{_size(memory.gradient_bytes)} {where}"),
            ("optimizer", f"{_size(memory.optimizer_bytes)} {where}"),
            ("in all", f"{up_to}{_size(memory.total_bytes)} {where}; activations come on top"),
        ]
    lines.append(("steps", str(plan.num_steps) if plan.num_steps is not None else "known when the rows are tokenised"))
    return lines + [("note", note) for note in plan.notes]


def _trained(plan: Plan) -> str:
    share = plan.trainable_share
    if share is None:
        return f"{plan.method}; how many parameters is known when the model is read"
    return f"{plan.method}, {plan.trainable_parameters:,} parameters ({100 * share:.2f} %)"


def _step(plan: Plan) -> str:
    batches = plan.batches
    many = "1 micro-batch" if batches.num_micro_batches == 1 else f"{batches.num_micro_batches} micro-batches"
    sequences = "1 sequence" if batches.global_batch_size == 1 else f"{batches.global_batch_size} sequences"
    said = f"{sequences} = {many} of {batches.micro_batch_size}"
    if batches.global_batch_size % batches.micro_batch_size:
        said += " (the last one smaller)"
    each = " + ".join(map(str, batches.shares))
    if len(set(batches.shares)) == 1:
        each = str(batches.shares[0])
    sharers = "processes" if plan.data_ranks == plan.layout.world_size else "data ranks"
    ranks = f"each of {plan.data_ranks} {sharers}" if plan.layout.world_size > 1 else "1 process"
    if len(set(batches.shares)) > 1:
        ranks = f"{plan.data_ranks} {sharers}"
    return f"{said}, {each} on {ranks} (gradient_accumulation_steps {batches.gradient_accumulation_steps})"


def _frozen(plan: Plan) -> str:
    assert plan.memory is not None
    if not plan.memory.frozen_bytes:
        return ""
    where = " (mapped once for all processes of a node on CPUs)" if plan.engine == "replicated" else ""
    return f", of which {_size(plan.memory.frozen_bytes)} frozen{where}"


def _base(plan: Plan) -> list[tuple[str, str]]:
    """What a quantised base saves."""
    memory = plan.memory
    if memory is None or not memory.quantized_bytes:
        return []
    count, wide = memory.quantized_parameters, 4 if plan.precision == "fp32" else 2
    full = f"{_size(count * wide)} in {plan.precision if plan.precision != 'auto' else 'bf16'}"
    saved = _size(count * wide - memory.quantized_bytes)
    return [("base", f"{plan.quantize}, {count:,} weights in {_size(memory.quantized_bytes)} instead of {full}: {saved} saved")]


def _size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{num_bytes} B" if units[0] == "B" else f"{value:.3g} {units[0]}"
