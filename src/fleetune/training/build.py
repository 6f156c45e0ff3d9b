"""From the spec to the parts of one rank. The last place that sees the spec."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.launch.pulse import Pulse
from fleetune.planning.engines import choose_engine
from fleetune.planning.zero import is_deepspeed, zero_of
from fleetune.spec.batches import Batches, derive, divide
from fleetune.spec.deepspeed_file import read_deepspeed
from fleetune.spec.errors import Preempted
from fleetune.spec.layout import derive_layout
from fleetune.spec.records import StepBatch
from fleetune.spec.run_folder import RunFolder, read_json, write_json
from fleetune.spec.run_spec import RunSpec
from fleetune.training.prepared import Prepared

if TYPE_CHECKING:
    from fleetune.data.plan import SamplePlan
    from fleetune.data.store import TokenStore
    from fleetune.models.causal import CausalModel
    from fleetune.models.wanted import WantedModel
    from fleetune.parallel.engines import EngineRequest
    from fleetune.parallel.whole import WholeModel
    from fleetune.parallel.world import World
    from fleetune.parallel.zero_settings import ZeroSettings
    from fleetune.training.held_out import HeldOut
    from fleetune.training.progress import Run
    from fleetune.training.signals import StopRequest

#: Held-out rows that a trial (`--smoke`) looks at.
_SMOKE_ROWS = 8
_log = logging.getLogger(__name__)


def batches_of(spec: RunSpec, *, data_ranks: int) -> Batches:
    """The division of a step in a new run. Raises UserError for numbers that do not divide."""
    optimization = spec.optimization
    return derive(
        global_batch_size=optimization.global_batch_size,
        micro_batch_size=optimization.micro_batch_size,
        gradient_accumulation_steps=optimization.gradient_accumulation_steps,
        data_ranks=data_ranks,
        sequence_length=spec.rows.sequence_length,
    )


@dataclass
class Parts:
    """Everything one rank needs for one run, from its first step to its summary. memory_before_loading: in bytes."""

    spec: RunSpec
    folder: RunFolder
    prepared: Prepared
    model: CausalModel
    whole: WholeModel
    run: Run
    store: TokenStore
    batches: Batches
    stop: StopRequest
    attempt: int
    memory_before_loading: int
    plan: SamplePlan | None = None
    held_out: HeldOut | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """Loaded when somebody reads or writes text: the training itself needs none."""
        from fleetune.models.tokenizer import load_tokenizer
        from fleetune.training.sources import template_file

        weights, prepared = self.spec.weights, self.prepared
        template = template_file(weights.chat_template, prepared.adapter_folder)
        return load_tokenizer(Path(prepared.model_folder), chat_template=template, allow_remote_code=weights.allow_remote_code)

    def steps(self) -> Iterator[StepBatch]:
        """This rank's batches, from where the run stands to its end."""
        from fleetune.data.loader import Loader
        from fleetune.training.stand import plan_of

        self.plan = plan_of(self)
        workers = self.spec.rows.num_workers
        with Loader(self.store, self.plan, self.batches, self.run.world.data_rank, num_workers=workers) as loader:
            yield from loader

    def resize(self, micro_batch_size: int) -> None:
        """Divide the steps that are read from now on anew; the sequences of a step, and their order, stay."""
        size = min(micro_batch_size, self.batches.global_batch_size)
        self.batches = divide(self.batches.global_batch_size, size, self.run.world.data_ranks)
        self.run.progress.micro_batch_size = size

    def open_validation(self) -> None:
        """Open the held-out rows, and say what they are worth before the first step."""
        from fleetune.training.assess import Stopped
        from fleetune.training.held_out import HeldOut

        output = self.spec.output
        run = self.run
        self.held_out = HeldOut.open(
            self.prepared.validation_store or "",
            engine=run.engine,
            whole=self.whole,
            world=run.world,
            micro_batch_tokens=self.spec.rows.sequence_length * self.batches.micro_batch_size,
            stop_requested=self._asked_meanwhile,
            tokenizer=lambda: self.tokenizer,
            max_new_tokens=output.max_new_tokens if output.exact_match else None,
            tell=self._tell_evaluating,
            max_rows=_SMOKE_ROWS if output.smoke else None,
        )
        run.evaluate = self.held_out.loss
        if run.progress.step == 0:
            try:
                before = self.held_out.assess()
            except Stopped:
                raise Preempted("asked to stop before the first step: nothing is lost, start again with --resume") from None
            run.progress.before = before.to_json()
            if run.monitor is not None:
                run.monitor.validation(0, before.loss, before.perplexity)
                write_json(self.folder.path / "before.json", {"replies": self.held_out.replies_json()})

    def _tell_evaluating(self, what: str, done: int, total: int) -> None:
        if self.run.monitor is not None:
            self.run.monitor.event("evaluating", what=what, done=done, total=total)

    def _asked_meanwhile(self) -> bool:
        """Whether to stop, asked between the batches of an evaluation: a sign that it gets on."""
        self.run.pulse.tick()
        return self.run.stop_requested()

    def replies_before(self) -> list[dict[str, Any]]:
        path = self.folder.path / "before.json"
        return read_json(path)["replies"] if path.exists() else []

    def base_model_name(self) -> str:
        """Where plain PEFT finds the base model again: the hub id a person typed, else the folder of its weights."""
        return self.prepared.hub_id or self.prepared.model_folder


@contextmanager
def build(spec: RunSpec, folder: RunFolder, attempt: int, stop: StopRequest, pulse: Pulse | None = None) -> Iterator[Parts]:
    """Join the ranks, load the model, build the engine, and go on from the last complete checkpoint. All ranks."""
    import torch

    from fleetune.parallel.world import Place, World
    from fleetune.training.room import find_room
    from fleetune.training.stand import go_on

    prepared = Prepared.read(folder, Place.from_environment().node)
    if spec.layout.threads:
        torch.set_num_threads(spec.layout.threads)
    if spec.health.determinism == "strict":
        # GPUs: sums whose order depends on the timing of threads are refused where they have no other form.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    layout = derive_layout(spec.layout.axes(), Place.from_environment().world_size)
    world = World.join(attempt=attempt, device=prepared.device, layout=layout, backend=spec.machines.backend)
    parts = None
    pulse = pulse or Pulse()
    pulse.at("load")
    try:
        room = find_room(spec, folder, world)
        if room.gradient_checkpointing:
            checkpointed = spec.optimization.model_copy(update={"gradient_checkpointing": True})
            spec = spec.model_copy(update={"optimization": checkpointed})
        parts = assemble(spec, folder, prepared=prepared, world=world, attempt=attempt, stop=stop)
        parts.run.pulse = pulse
        parts.run.room = room
        go_on(parts)
        yield parts
    finally:
        if parts is not None and parts.run.monitor is not None:
            parts.run.monitor.close()
        world.leave()


def assemble(
    spec: RunSpec,
    folder: RunFolder,
    *,
    prepared: Prepared,
    world: World,
    attempt: int,
    stop: StopRequest,
) -> Parts:
    """Load the model and put the parts of this rank together. Nothing is trained, read from a checkpoint or written yet."""
    from fleetune.data.store import TokenStore
    from fleetune.monitor.memory import PeakMemory
    from fleetune.parallel.engines import build_engine
    from fleetune.training.progress import Cadence, Policy, Run
    from fleetune.training.room import Room
    from fleetune.training.saving import make_saves
    from fleetune.training.spread import open_checkpoints

    output, health = spec.output, spec.health
    peak_memory = PeakMemory(torch_peak(world))
    before_loading = peak_memory()
    batches = batches_of(spec, data_ranks=world.data_ranks)
    built = build_engine(choose_engine(spec, world.layout), engine_request(spec, prepared, world, batches))
    checkpoints = open_checkpoints(
        folder.checkpoints,
        world,
        keep=output.keep_checkpoints,
        fingerprints={"model": prepared.model_fingerprint, "data": prepared.data_fingerprint},
    )
    run = Run(
        world=world,
        engine=built.engine,
        monitor=None,
        checkpoints=checkpoints,
        saves=make_saves(checkpoints, world, folder, mode=health.save_mode, held=built.engine.held()),
        schedule=lambda step: 0.0,
        cadence=Cadence(output.checkpoint_every, output.evaluate_every, output.early_stop, health.check_replicas_every),
        policy=Policy(health.on_nonfinite, health.on_spike, health.skip_window),
        evaluate=lambda: None,
        stop_requested=lambda: stop.requested,
        peak_memory=peak_memory,
        resize=lambda size: parts.resize(size),
        room=Room(),
    )
    store = TokenStore.open(Path(prepared.store))
    whole = built.whole or partial(nullcontext, built.model)
    parts = Parts(spec, folder, prepared, built.model, whole, run, store, batches, stop, attempt, before_loading)
    return parts


def engine_request(spec: RunSpec, prepared: Prepared, world: World, batches: Batches) -> EngineRequest:
    """What any engine is made of, in its own words: behind this, nobody sees the spec."""
    from fleetune.parallel.engines import EngineRequest, PipeSettings
    from fleetune.parallel.native import StepSettings
    from fleetune.training.optimizers import OPTIMIZERS, AdamWSettings

    optimization = spec.optimization
    settings = AdamWSettings(optimization.beta1, optimization.beta2, optimization.epsilon, optimization.weight_decay)
    return EngineRequest(
        world=world,
        model=wanted_model(spec, prepared),
        optimizer=OPTIMIZERS[optimization.optimizer](settings),
        settings=StepSettings(
            gradient_clip=optimization.gradient_clip,
            precision=prepared.precision,
            accumulate=spec.layout.accumulate,
            strict=spec.health.determinism == "strict",
            recovers=spec.health.dynamic_batch_size,
        ),
        zero=zero_settings(spec),
        pipe=PipeSettings(spec.layout.pipeline_schedule, batches.micro_batch_size * spec.rows.sequence_length),
    )


def zero_settings(spec: RunSpec) -> ZeroSettings | None:
    """How DeepSpeed is to share out the training state; None where it is not the engine."""
    if not is_deepspeed(spec):
        return None
    from fleetune.parallel.zero_settings import ZeroSettings

    zero = zero_of(spec)
    return ZeroSettings(
        stage=zero.stage,
        offload=zero.offload,
        cpu_adam=zero.offload != "none" and spec.optimization.optimizer == "cpu_adam",
        options=read_deepspeed(Path(spec.zero.deepspeed)).options if spec.zero.deepspeed else {},
    )


def wanted_model(spec: RunSpec, prepared: Prepared) -> WantedModel:
    """The model with what is trained of it: all of it, a new adapter, or one that the person gave."""
    from fleetune.models.wanted import WantedAdapter, WantedModel

    adaptation, optimization = spec.adaptation, spec.optimization
    is_new = adaptation.method == "lora" and prepared.adapter_folder is None
    new = WantedAdapter(
        adaptation.adapter,
        adaptation.lora_rank,
        adaptation.lora_alpha,
        adaptation.lora_dropout,
        adaptation.lora_targets,
    )
    return WantedModel(
        folder=Path(prepared.model_folder),
        precision=prepared.precision,
        adapter=new if is_new else None,
        adapter_folder=Path(prepared.adapter_folder) if prepared.adapter_folder else None,
        quantized=Path(prepared.quantized_folder) if prepared.quantized_folder else None,
        allow_remote_code=spec.weights.allow_remote_code,
        gradient_checkpointing=optimization.gradient_checkpointing,
        fast=optimization.fast == "on",
        seed=optimization.seed,
    )


def torch_peak(world: World) -> Any:
    """Peak bytes of the CUDA allocator, or None on a CPU (the process's own memory counts there)."""
    if world.device.type != "cuda":
        return None
    import torch

    return lambda: int(torch.cuda.max_memory_allocated(world.device))
