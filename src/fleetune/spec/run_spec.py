"""What is asked of a run. Every field is declared here, once: its flag, help, unit, default and aliases come from it.

A field's description is its help on the command line and its entry in the reference. Sections never share a field name,
so a flag, an environment variable (`FLEETUNE_<NAME>`) or a key of a YAML file needs no prefix.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from fleetune.spec.health_section import HealthSection, SurvivalSection
from fleetune.spec.layout_section import LayoutSection
from fleetune.spec.machines_section import MachinesSection
from fleetune.spec.section import Columns, Numbers, Paths, Words
from fleetune.spec.section import Section as _Section
from fleetune.spec.section import declare as _field
from fleetune.spec.trackers_section import TrackersSection
from fleetune.spec.zero_section import ZeroSection


class WeightsSection(_Section):
    """Which model, and how its weights are read."""

    model: str = _field(
        "",
        "The model: a preset, a hub id, a folder, a .gguf file, an adapter or a run folder.",
        aliases=("base_model", "model_name", "model_name_or_path"),
    )
    preset: str | None = _field(
        None,
        "Take the defaults of this preset (fleetune presets) for whatever model. Empty: those of --model, if it is one.",
    )
    revision: str | None = _field(None, "Commit, tag or branch of a hub model. A commit is the only one that cannot move.")
    offline: bool = _field(False, "Never use the network: a hub model must be in the local cache.", resume=True)
    allow_remote_code: bool = _field(
        False, "Run Python files that come with the model. They can do anything you can; their names are printed first."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = _field(
        "auto",
        "Number format of the forward and backward pass. auto: the fastest exact enough one, by probing the device; of a run's "
        "result, the one it was trained in.",
    )
    chat_template: str | None = _field(None, "A Jinja file to use instead of the model's own chat template.")


class RowsSection(_Section):
    """Which data, and how rows become sequences."""

    data: Paths = _field(
        (),
        "Training data: a file (jsonl, json, csv, parquet, txt), a folder, or a hub data set. Repeat it for several.",
        aliases=("dataset_path", "data_path", "dataset"),
    )
    data_weights: Numbers = _field(
        (), "How often each row of each --data is seen in an epoch, in their order: 2 is twice, 0.5 every other row."
    )
    data_shape: Literal["auto", "alpaca", "sharegpt", "messages", "prompt", "text"] = _field(
        "auto", "What a row looks like. auto: found by looking, and told."
    )
    columns: Columns = _field({}, "Which column plays which role: prompt=question,response=answer,system=context,text=body.")
    validation: Paths = _field((), "Held-out data, in any form that --data takes.")
    validation_share: float = _field(
        0.0, "Share of the training rows that is held out when there is no --validation.", ge=0.0, lt=1.0
    )
    sequence_length: int = _field(
        1024, "Tokens per sequence, at most.", aliases=("max_length", "cutoff_len", "max_seq_length"), ge=8
    )
    packing: bool = _field(True, "Put several rows into one sequence. Attention never crosses from one row to another.")
    over_long: Literal["drop", "cut", "split", "error"] = _field(
        "drop",
        "A row longer than --sequence-length is dropped (and counted), cut at its end, split into pieces, or an error. "
        "Plain text is always split unless 'error' is asked for.",
    )
    train_on: Literal["assistant", "all"] = _field(
        "assistant", "Which tokens of a conversation are trained: the assistant's turns, or all of them."
    )
    max_bad_share: float = _field(
        0.01, "Stop when more than this share of the rows cannot be used. They go to quarantine.jsonl.", ge=0.0, le=1.0
    )
    num_workers: int = _field(
        1, "Threads that read ahead; 0 reads in the training loop. The wait for data is measured.", ge=0, le=64, resume=True
    )


class AdaptationSection(_Section):
    """What is trained: all weights, or an adapter."""

    method: Literal["full", "lora", "qlora"] = _field(
        "lora", "Train all weights, or a low-rank adapter. qlora: an adapter on a base that rests in 4 bits (lora with nf4)."
    )
    quantize: Literal["none", "int8", "nf4"] = _field(
        "none",
        "How the frozen linear layers of the blocks rest under an adapter: as they are, in 8 bits (LLM.int8's weights) or in "
        "4 (QLoRA's NormalFloat, scales quantised too). They compute in --precision.",
    )
    adapter: Literal["lora", "dora", "rslora"] = _field("lora", "Which kind of low-rank adapter.")
    lora_rank: int = _field(8, "Rank of the adapter.", aliases=("lora_r",), ge=1, le=4096)
    lora_alpha: float = _field(16.0, "The adapter is scaled by alpha / rank (rslora: alpha / sqrt(rank)).", gt=0)
    lora_dropout: float = _field(0.0, "Dropout in front of the adapter.", ge=0.0, lt=1.0)
    lora_targets: Words = _field(
        (),
        "Names of the linear layers (or stacked experts) that get an adapter, as q_proj,v_proj. Empty: all linears.",
    )


class OptimizationSection(_Section):
    """How the loss is made small."""

    epochs: float = _field(1.0, "How often each row is seen.", aliases=("num_epochs",), gt=0, resume=True)
    max_steps: int | None = _field(None, "Stop after this many optimizer steps, whatever --epochs says.", ge=1, resume=True)
    schedule_steps: int | None = _field(
        None, "Horizon of the learning-rate schedule. Empty: the number of steps known at the first start.", ge=1, resume=True
    )
    learning_rate: float | None = _field(None, "Peak learning rate. Empty: 2e-4 for an adapter, 2e-5 for full.", gt=0)
    schedule: Literal["cosine", "linear", "constant"] = _field("cosine", "Shape of the learning rate after the warmup.")
    warmup: float = _field(0.03, "Share of the steps in which the learning rate rises from 0.", ge=0.0, lt=1.0)
    warmup_steps: int | None = _field(None, "The same in optimizer steps, instead of a share.", ge=0)
    final_learning_rate_share: float = _field(0.1, "The schedule ends at this share of the peak.", ge=0.0, le=1.0)
    optimizer: Literal["adamw", "adam", "cpu_adam"] = _field(
        "adamw",
        "adamw decays weights beside the gradient, adam within it. cpu_adam is adamw whose state and update are on the CPU.",
        aliases=("optimizer_name",),
    )
    beta1: float = _field(0.9, "AdamW: decay of the gradient's mean.", ge=0.0, lt=1.0)
    beta2: float = _field(0.999, "AdamW: decay of the gradient's square.", ge=0.0, lt=1.0)
    epsilon: float = _field(1e-8, "AdamW: added to the denominator.", gt=0)
    weight_decay: float = _field(0.0, "AdamW: decay of matrices; never of biases and norms.", ge=0.0)
    gradient_clip: float = _field(1.0, "Scale the gradient down to this L2 norm; 0 never does.", ge=0.0)
    gradient_checkpointing: bool = _field(
        False, "Keep only each block's input and compute the rest again in the backward pass: less memory, slower.", resume=True
    )
    fast: Literal["on", "off"] = _field(
        "on",
        "off: the plain path, to compare with: the family's own layers and attention, one row per document, plain products in "
        "adapters, all logits at once. The same losses up to rounding; slower, and several times the memory.",
    )
    global_batch_size: int | None = _field(
        None, "Sequences per optimizer step over all ranks. Empty: 8.", aliases=("train_batch_size",), ge=1
    )
    micro_batch_size: int | None = _field(
        None,
        "Sequences per forward and backward on one data rank. Empty: what fits in 1024 tokens and divides.",
        aliases=("per_device_train_batch_size", "batch_size"),
        ge=1,
        resume=True,
    )
    gradient_accumulation_steps: int | None = _field(
        None,
        "Micro-batches per data rank and step. Two of global, micro and this give the third.",
        aliases=("accumulation",),
        ge=1,
        resume=True,
    )
    seed: int = _field(0, "Seed of everything that is random.", ge=0, lt=2**63)


class OutputSection(_Section):
    """The run folder, and what goes into it."""

    run: str | None = _field(None, "The run folder. Empty: runs/ and a name made of the model, the data and the time.")
    resume: bool = _field(False, "Go on from the last complete checkpoint of --run, if there is one.", resume=True)
    checkpoint_every: int | None = _field(
        None,
        "Save every so many steps; 0 only at the end. Empty: as often as pays, by what a save costs and how often the run is "
        "interrupted (Young 1974: the square root of 2 x cost x time between failures).",
        ge=0,
        resume=True,
    )
    keep_checkpoints: int = _field(2, "Complete checkpoints to keep, besides the best one.", ge=1, resume=True)
    evaluate_every: int = _field(
        0, "Evaluate on the held-out rows every so many steps; 0 only before and after.", ge=0, resume=True
    )
    exact_match: bool = _field(
        False,
        "Also let the model answer the held-out rows, before and after, and count the answers that are exactly right.",
        resume=True,
    )
    max_new_tokens: int = _field(128, "Longest answer of the model, in tokens.", ge=1, resume=True)
    early_stop: int = _field(
        0, "Stop after this many evaluations without a better held-out loss; 0 never does.", ge=0, resume=True
    )
    log_level: Literal["debug", "info", "warning", "error"] = _field("info", "How much the logs say.", resume=True)
    smoke: bool = _field(
        False,
        "Try the whole way in about a minute, then stop: the longest batch, an evaluation, a save, a resume and an export. "
        "Nothing is kept.",
    )
    json_output: bool = _field(False, "Print the summary as JSON on stdout, for programs.", aliases=("json",), resume=True)


class RunSpec(_Section):
    """A whole run: what is asked, checked, and nothing else. Made by `fleetune.spec.read.resolve`."""

    weights: WeightsSection = WeightsSection()
    rows: RowsSection = RowsSection()
    adaptation: AdaptationSection = AdaptationSection()
    optimization: OptimizationSection = OptimizationSection()
    layout: LayoutSection = LayoutSection()
    machines: MachinesSection = MachinesSection()
    zero: ZeroSection = ZeroSection()
    survival: SurvivalSection = SurvivalSection()
    output: OutputSection = OutputSection()
    trackers: TrackersSection = TrackersSection()
    health: HealthSection = HealthSection()

    @model_validator(mode="after")
    def _fields_agree(self) -> RunSpec:
        problems = []
        rows = self.rows
        if rows.data_weights and len(rows.data_weights) != len(rows.data):
            problems.append(
                f"data_weights has {len(rows.data_weights)} numbers and data has {len(rows.data)} sources: give one for each"
            )
        if any(weight <= 0 for weight in rows.data_weights):
            problems.append(f"data_weights {list(rows.data_weights)} must all be above 0: leave out a source instead")
        if rows.validation and rows.validation_share:
            problems.append("validation and validation_share both name held-out rows: give one of them")
        layout = self.layout
        if layout.min_gpus is not None and layout.gpus is not None and layout.min_gpus > layout.gpus:
            problems.append(
                f"min_gpus {layout.min_gpus} is more than gpus {layout.gpus}: give --gpus MIN:MAX, the smaller first"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def flat(self) -> dict[str, Any]:
        """All fields by name, without their sections, as plain JSON values."""
        return {name: value for section in self.model_dump(mode="json").values() for name, value in section.items()}


def sections() -> dict[str, type[_Section]]:
    """The sections of a run by name, in order."""
    return {name: field.annotation for name, field in RunSpec.model_fields.items()}  # type: ignore[misc]


def fields() -> dict[str, tuple[str, Any]]:
    """Every field: name -> (section, pydantic FieldInfo). A name that two sections share is a fault of this file."""
    found: dict[str, tuple[str, Any]] = {}
    for section, cls in sections().items():
        for name, info in cls.model_fields.items():
            if name in found:
                raise AssertionError(f"the sections {found[name][0]} and {section} share the field {name}")
            found[name] = (section, info)
    return found


def aliases() -> dict[str, str]:
    """Other tools' names: alias -> field name."""
    return {alias: name for name, (_, info) in fields().items() for alias in info.json_schema_extra["aliases"]}


def from_flat(values: dict[str, Any]) -> RunSpec:
    """Build a spec from flat values. Raises pydantic.ValidationError; `read.resolve` turns it into a `UserError`."""
    where = fields()
    nested: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for name, value in values.items():
        nested[where[name][0]][name] = value
    return RunSpec.model_validate(nested)
