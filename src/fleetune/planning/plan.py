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
from fleetune.planning.zero import is_deepspeed, zero_of
from fleetune.spec.batches import Batches, derive, num_steps
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import ModelShape
from fleetune.spec.run_spec import RunSpec
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
        how = {"precision": precision, "layout": layout, "accumulate": spec.layout.accumulate}
        memory = rank_memory(_base(shape), trained, resting=quantised(shape.linears, quantize), **how)  # type: ignore[arg-type]
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
        notes=tuple(_notes(spec, shape)),
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


def _adapter(spec: RunSpec, shape: ModelShape, adapter: Mapping[str, StoredTensor] | None) -> list[tuple[int, ...]] | None:
    """Shapes of the weights of the adapter that is trained; None where names of modules are not known yet."""
    adaptation = spec.adaptation
    if adapter is not None:
        return [tensor.shape for tensor in adapter.values()]
    if adaptation.lora_targets and (not shape.names_known or may_name_experts(shape, adaptation.lora_targets)):
        return None
    linears = find_targets(shape, adaptation.lora_targets)
    return adapter_shapes(linears, adapter=adaptation.adapter, rank=adaptation.lora_rank)


def _base(shape: ModelShape) -> list[tuple[tuple[int, ...], bool]]:
    """(shape, whether it is a linear layer of a block) of every parameter of the model."""
    linears = {(linear.block, f"{linear.name}.weight") for linear in shape.linears}

    def is_linear(name: str) -> bool:
        parts = name.split(".")
        return any(part.isdigit() and (int(part), ".".join(parts[at + 1 :])) in linears for at, part in enumerate(parts))

    return [(tensor.shape, is_linear(name)) for name, tensor in shape.parameters.items()]


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
