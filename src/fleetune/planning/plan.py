"""What a run will be, worked out before anything is written: the division of a step, exact bytes, and what cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fleetune.planning.adapters import adapter_shapes, find_targets, may_name_experts
from fleetune.planning.combinations import refusals
from fleetune.planning.engines import choose_engine
from fleetune.planning.memory import RankMemory, quantised, rank_memory, under_zero
from fleetune.planning.rule import Asked
from fleetune.planning.stages import block_of, stage_weights, waiting_share
from fleetune.planning.zero import is_deepspeed, zero_of
from fleetune.spec.batches import Batches, derive, num_steps
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import ModelShape
from fleetune.spec.run_spec import RunSpec
from fleetune.spec.stages import RUNS_PER_RANK
from fleetune.spec.stored_tensor import StoredTensor


@dataclass(frozen=True)
class Plan:
    """engine: its name in `planning/engines.py`. precision: `auto` where only the device will tell.

    trainable_parameters: None where names of a GGUF's modules are not known before it is converted. num_steps: None until
    the rows are counted. notes: what a person should know, in sentences.
    """

    layout: Layout
    engine: str
    batches: Batches
    method: str
    model_type: str
    precision: str
    quantize: str
    num_parameters: int
    trainable_parameters: int | None
    memory: RankMemory | None
    num_sequences: int | None
    num_steps: int | None
    notes: tuple[str, ...]

    @property
    def data_ranks(self) -> int:
        return self.layout.data_ranks

    @property
    def trainable_share(self) -> float | None:
        """Trained parameters / all, those of the adapter included."""
        if self.trainable_parameters is None:
            return None
        more = self.trainable_parameters if self.method == "lora" else 0
        return self.trainable_parameters / (self.num_parameters + more)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, for plan.json."""
        batches = {**asdict(self.batches), "shares": list(self.batches.shares)}
        return {
            "layout": self.layout.to_json(),
            "engine": self.engine,
            "data_ranks": self.data_ranks,
            **batches,
            "gradient_accumulation_steps": self.batches.gradient_accumulation_steps,
            "method": self.method,
            "model_type": self.model_type,
            "precision": self.precision,
            "quantize": self.quantize,
            "num_parameters": self.num_parameters,
            "trainable_parameters": self.trainable_parameters,
            "trainable_share": self.trainable_share,
            "rank_memory": asdict(self.memory) if self.memory else None,
            "num_sequences": self.num_sequences,
            "num_steps": self.num_steps,
            "notes": list(self.notes),
        }


def make_plan(
    spec: RunSpec,
    shape: ModelShape,
    *,
    layout: Layout,
    device: str = "cpu",
    num_sequences: int | None = None,
    adapter: Mapping[str, StoredTensor] | None = None,
) -> Plan:
    """The plan of a run in a layout. Raises one UserError with everything that cannot be.

    device: `cpu` or `cuda`. num_sequences: sequences of an epoch, where the rows are counted already. adapter: the tensors
    of an adapter that training goes on with; its shape is its own, whatever the spec says of rank and targets.
    """
    problems: list[str] = []
    batches, trained, engine = None, None, ""
    try:
        engine = choose_engine(spec, layout)
    except UserError as error:
        problems += error.problems
    problems += refusals(Asked(spec, layout, engine, device, shape))
    try:
        batches = divide_step(spec, layout)
    except UserError as error:
        problems += error.problems
    try:
        trained = _adapter(spec, shape, adapter) if spec.adaptation.method == "lora" else None
    except UserError as error:
        problems += error.problems
    problems += _too_long(spec, shape)
    problems += _not_quantizable(spec, shape)
    raise_if_any(problems)
    assert batches is not None
    method, precision, quantize = spec.adaptation.method, spec.weights.precision, spec.adaptation.quantize
    is_known = method == "full" or trained is not None
    memory = None
    if is_known:
        memory = _largest_rank(spec, shape, layout, adapter)
        memory = under_zero(memory, zero_of(spec), layout.world_size) if is_deepspeed(spec) else memory
    trainable = None if not is_known else shape.num_parameters if trained is None else sum(map(math.prod, trained))
    return Plan(
        layout=layout,
        engine=engine,
        batches=batches,
        method=method,
        model_type=shape.model_type,
        precision=precision,
        quantize=quantize,
        num_parameters=shape.num_parameters,
        trainable_parameters=trainable,
        memory=memory,
        num_sequences=num_sequences,
        num_steps=_num_steps(spec, batches, num_sequences),
        notes=(*_notes(spec, shape), *_pipeline_notes(spec, layout, batches)),
    )


def divide_step(spec: RunSpec, layout: Layout) -> Batches:
    """The division of a step over the data ranks. Raises UserError where it does not divide, or leaves some idle."""
    given, data_ranks = spec.optimization, layout.data_ranks
    batches = derive(
        global_batch_size=given.global_batch_size,
        micro_batch_size=given.micro_batch_size,
        gradient_accumulation_steps=given.gradient_accumulation_steps,
        data_ranks=data_ranks,
        sequence_length=spec.rows.sequence_length,
        any_world=spec.health.determinism == "strict",
    )
    if batches.num_micro_batches < data_ranks:
        sharers = "processes" if data_ranks == layout.world_size else f"data ranks ({layout.describe()})"
        raise UserError(
            f"{data_ranks} {sharers} share {batches.num_micro_batches} micro-batches of {batches.micro_batch_size} sequences "
            f"in a step of {batches.global_batch_size}, so {data_ranks - batches.num_micro_batches} of them would never "
            f"compute: give --gpus {batches.num_micro_batches * (layout.world_size // data_ranks)}, a smaller "
            "--micro-batch-size or a larger --global-batch-size"
        )
    return batches


def _largest_rank(spec: RunSpec, shape: ModelShape, layout: Layout, adapter: Mapping[str, StoredTensor] | None) -> RankMemory:
    """Memory of the rank that holds most: that of the largest stage."""
    how = {"precision": spec.weights.precision, "layout": layout, "accumulate": spec.layout.accumulate}
    is_full = spec.adaptation.method == "full"
    if layout.pipeline == 1:
        trained = None if is_full else _adapter(spec, shape, adapter)
        resting = quantised(shape.linears, spec.adaptation.quantize)
        return rank_memory(_base(shape), trained, resting=resting, **how)  # type: ignore[arg-type]
    stages = stage_weights(shape, layout.pipeline, spec.layout.pipeline_schedule)
    memories = (
        rank_memory(
            _base(shape, stage.names),
            None if is_full else _adapter(spec, shape, adapter, stage.blocks),
            **how,  # type: ignore[arg-type]
        )
        for stage in stages
    )
    return max(memories, key=lambda memory: memory.total_bytes)


def _pipeline_notes(spec: RunSpec, layout: Layout, batches: Batches) -> list[str]:
    if layout.pipeline == 1:
        return []
    smallest = min(batches.shares)
    share = waiting_share(smallest, layout.pipeline, RUNS_PER_RANK[spec.layout.pipeline_schedule])
    notes = [
        f"with {smallest} micro-batch{'es' if smallest > 1 else ''} on each data rank for {layout.pipeline} stages, a rank "
        f"waits {100 * share:.0f} % of a step for the others: smaller micro-batches or a larger --global-batch-size make it "
        "less"
    ]
    if spec.output.exact_match:
        notes.append("answers for --exact-match need the whole model: the first rank of each share holds it while it answers")
    return notes


def _adapter(
    spec: RunSpec,
    shape: ModelShape,
    adapter: Mapping[str, StoredTensor] | None,
    blocks: frozenset[int] | None = None,
) -> list[tuple[int, ...]] | None:
    """Shapes of the weights of the adapter that is trained, in some blocks or in all; None where names of modules are not
    known yet."""
    adaptation = spec.adaptation
    if adapter is not None:
        return [tensor.shape for name, tensor in adapter.items() if blocks is None or block_of(name) in blocks]
    if adaptation.lora_targets and (not shape.names_known or may_name_experts(shape, adaptation.lora_targets)):
        return None
    linears = [linear for linear in find_targets(shape, adaptation.lora_targets) if blocks is None or linear.block in blocks]
    return adapter_shapes(linears, adapter=adaptation.adapter, rank=adaptation.lora_rank)


def _base(shape: ModelShape, names: frozenset[str] | None = None) -> list[tuple[tuple[int, ...], bool]]:
    """(shape, whether it is a linear layer of a block) of every parameter of the model, or of those with these names."""
    linears = {(linear.block, f"{linear.name}.weight") for linear in shape.linears}

    def is_linear(name: str) -> bool:
        parts = name.split(".")
        return any(part.isdigit() and (int(part), ".".join(parts[at + 1 :])) in linears for at, part in enumerate(parts))

    return [(tensor.shape, is_linear(name)) for name, tensor in shape.parameters.items() if names is None or name in names]


def _too_long(spec: RunSpec, shape: ModelShape) -> list[str]:
    length, positions = spec.rows.sequence_length, shape.max_positions
    if not shape.has_position_table or positions is None or length <= positions:
        return []
    return [
        f"sequence_length {length} is longer than the {positions} positions that this {shape.model_type} model has learned: "
        f"give --sequence-length {positions} or less"
    ]


def _not_quantizable(spec: RunSpec, shape: ModelShape) -> list[str]:
    if spec.adaptation.quantize == "none" or shape.linears:
        return []
    return [
        f"quantize {spec.adaptation.quantize} makes the linear layers of the blocks smaller, and none were found in this "
        f"{shape.model_type} model: leave --quantize out"
    ]


def _num_steps(spec: RunSpec, batches: Batches, num_sequences: int | None) -> int | None:
    optimization = spec.optimization
    if optimization.max_steps is not None:
        return optimization.max_steps
    if num_sequences is None:
        return None
    return num_steps(num_sequences, optimization.epochs, batches.global_batch_size)


def _notes(spec: RunSpec, shape: ModelShape) -> list[str]:
    notes: list[str] = []
    length, positions = spec.rows.sequence_length, shape.max_positions
    if positions is not None and length > positions and not shape.has_position_table:
        notes.append(f"sequence_length {length} is longer than the {positions} tokens that the model was made for")
    if spec.adaptation.quantize != "none" and shape.expert_parameters:
        notes.append(
            f"quantize {spec.adaptation.quantize} leaves the stacked experts as they are: {shape.expert_parameters:,} of "
            f"{shape.num_parameters:,} parameters stay in the compute type"
        )
    if is_deepspeed(spec):
        zero = zero_of(spec)
        notes.append(f"DeepSpeed keeps the training state: zero_stage {zero.stage}, offload {zero.offload}")
    return notes
