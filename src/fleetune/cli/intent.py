"""What a person asks of a run, worked out before anything is written: spec, model, plan, and everything that is wrong."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.cli.foreign import absent_for_deepspeed, earlier_source, foreign_notes, read_foreign
from fleetune.cli.look import look_at_data
from fleetune.cli.machines import LedElsewhere, Machines, find_machines
from fleetune.cli.place import check_new, default_path
from fleetune.launch.devices import count_devices
from fleetune.launch.fleet import Fleet
from fleetune.models.config import read_json_object
from fleetune.models.locate import Located, locate
from fleetune.models.presets import Preset, find_preset, refuse_moved, similar_presets
from fleetune.models.quantized_files import QuantisedUnder
from fleetune.planning.plan import Plan, divide_step, make_plan
from fleetune.planning.zero import is_deepspeed
from fleetune.spec.agreement import against_adapter, optimizer_elsewhere, without_effect
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.given import Source, environment_given, file_given, preset_given
from fleetune.spec.layout import Layout, derive_layout
from fleetune.spec.model_shape import read_shape
from fleetune.spec.read import Resolved, read_run, resolve
from fleetune.spec.resume import check_resume
from fleetune.spec.run_folder import RunFolder
from fleetune.spec.run_spec import RunSpec, WeightsSection
from fleetune.spec.safetensors_header import read_header


@dataclass(frozen=True)
class Intent:
    """A run that could be started. folder: where it will live. device: `cpu` or `cuda`. notes: what a person should know.

    fleet: the machines, connected, where there are several; `close` lets go of them."""

    resolved: Resolved
    located: Located
    plan: Plan
    folder: RunFolder
    device: str
    num_processes: int
    notes: tuple[str, ...] = ()
    fleet: Fleet | None = None

    @property
    def spec(self) -> RunSpec:
        return self.resolved.spec

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet.close()


def work_out(flags: Source, file: Path | None = None, *, is_start: bool = True, processes: int | None = None) -> Intent:
    """From flags, environment and file to a run that could be started. Raises one UserError with all problems; LedElsewhere
    where another machine leads the run.

    is_start: it is to be started now, so there must be data, and its folder must be free or the one to go on in.
    processes: how many run already, where a foreign launcher has started them.
    """
    required = ("model", "data") if is_start else ("model",)
    resolved, earlier, told = _resolved(flags, file_given(file) if file else None, required)
    spec = resolved.spec
    problems: list[str] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except LedElsewhere:
            raise
        except UserError as error:
            problems.extend(error.problems)

    place = Path(spec.output.run or "runs").absolute()
    machines = attempt(lambda: find_machines(spec, place, is_start=is_start and processes is None)) or Machines()
    device, num_processes = machines.device, machines.num_processes
    if processes is not None:
        device, num_processes = attempt(lambda: _processes(spec, processes)) or ("cpu", 1)
    problems += [] if is_deepspeed(spec) else optimizer_elsewhere(resolved, device)
    if spec.rows.data or spec.rows.validation:
        attempt(lambda: look_at_data(spec.rows, offline=spec.weights.offline))
    attempt(lambda: _check_template(spec.weights.chat_template))
    problems += without_effect(resolved)
    problems += [*_absent_packages(spec), *absent_for_deepspeed(spec)] if is_start else []
    located = attempt(lambda: _located(spec))
    # Without a model the plan cannot be made, but the division of a step can be checked all the same.
    layout = attempt(lambda: derive_layout(spec.layout.axes(), num_processes)) or Layout(replicate=num_processes)
    plan = attempt(lambda: planned(spec, located, layout, device) if located else divide_step(spec, layout))
    if located is not None and located.adapter is not None:
        problems += against_adapter(resolved, read_json_object(located.adapter / "adapter_config.json"))
    resolved = _absolute(resolved, located)
    notes: tuple[str, ...] = machines.notes
    if is_start and earlier is None and spec.output.run is not None:
        attempt(lambda: check_new(_folder(resolved, located)))
    elif is_start and earlier is not None and isinstance(plan, Plan):
        notes += attempt(lambda: check_resume(earlier, with_plan(resolved, plan))) or ()
    if problems:
        machines.close()
    raise_if_any(problems)
    notes += tuple(_another_base(spec, located))
    return Intent(resolved, located, plan, _folder(resolved, located), device, num_processes, (*told, *notes), machines.fleet)


def _folder(resolved: Resolved, located: Located) -> RunFolder:
    """Where the run will live, as it was named, or else by model, data and time."""
    spec = resolved.spec
    run = spec.output.run or default_path(located.name, spec.rows.data[0] if spec.rows.data else "")
    return RunFolder(Path(run).absolute())


def _resolved(flags: Source, file: Source | None, required: Sequence[str]) -> tuple[Resolved, Resolved | None, tuple[str, ...]]:
    """(the spec, the run that is resumed or None, notes). The first look tells which run, preset and file of DeepSpeed's."""
    sources = {"flags": flags, "environment": environment_given(os.environ), "file": file}
    try:
        first = resolve(**sources, required=()).spec
    except UserError:
        return resolve(**sources, required=required), None, ()  # raises again, with what is missing as well
    earlier = None
    if first.output.resume:
        if first.output.run is None:
            raise UserError("resume is asked for, and no run is named: give --run with the folder of the run")
        folder = RunFolder(Path(first.output.run))
        earlier = read_run(folder) if folder.exists() else None
    preset = preset_of(first.weights if first.weights.model or not earlier else earlier.spec.weights)
    foreign = read_foreign(first, earlier)
    resolved = resolve(
        **sources,
        foreign=foreign.source if foreign else None,
        earlier=earlier_source(earlier, first) if earlier else None,
        preset=preset_given(preset.name, preset.values) if preset else None,
        required=required,
    )
    return resolved, earlier, foreign_notes(foreign, preset)


def _processes(spec: RunSpec, started: int) -> tuple[str, int]:
    """(kind of device, number of processes); started: how many there are already, by somebody else's doing."""
    asked = spec.layout.gpus
    if asked not in (None, started):
        raise UserError(
            f"gpus {asked} is asked for, and the launcher has started {started} processes: leave it out, or start {asked}"
        )
    return count_devices(spec.layout.device)[0], started


def preset_of(weights: WeightsSection) -> Preset | None:
    """The preset whose defaults count: the one that is named, else the model's, if it is one. Raises UserError."""
    if weights.preset is None:
        return find_preset(weights.model) if weights.model else None
    found = find_preset(weights.preset)
    if found is None:
        refuse_moved(weights.preset)
        near = similar_presets(weights.preset)
        hint = f"did you mean {near[0]}?" if near else "fleetune presets lists them"
        raise UserError(f"there is no preset {weights.preset!r}: {hint}")
    return found


def _located(spec: RunSpec) -> Located:
    weights = spec.weights
    located = locate(
        weights.model, revision=weights.revision, offline=weights.offline, allow_remote_code=weights.allow_remote_code
    )
    if located.adapter is not None and spec.adaptation.method == "full":
        raise UserError(
            f"model {weights.model!r} is an adapter, and --method full trains all weights: give --method lora to go on with "
            "the adapter, or merge it first with fleetune export --to merged"
        )
    return located


def _another_base(spec: RunSpec, located: Located) -> list[str]:
    """An adapter that goes on with a base that rests otherwise than it did: allowed, and never unsaid."""
    if located.adapter is None:
        return []
    was, now = QuantisedUnder.read(located.adapter), spec.adaptation.quantize
    before = was.quantize if was else "none"
    if before == now:
        return []
    return [
        f"the adapter that training goes on with was trained with quantize {before}, and this run has {now}: give "
        f"--quantize {before} to go on with the same base"
    ]


def planned(spec: RunSpec, located: Located, layout: Layout, device: str) -> Plan:
    """The plan of a run in this layout. Raises UserError where it cannot be done."""
    adapter = read_header(located.adapter / "adapter_model.safetensors") if located.adapter else None
    return make_plan(spec, read_shape(located.path), layout=layout, device=device, adapter=adapter)


def _absent_packages(spec: RunSpec) -> list[str]:
    """What training needs and a login node may lack; none of it is imported here."""
    problems = [
        f"training needs the package {name}, which is not installed here: pip install {name}, or train on another machine"
        for name in ("torch", "transformers")
        if not _is_installed(name)
    ]
    quantize = spec.adaptation.quantize
    if quantize != "none" and not _is_installed("bitsandbytes"):
        problems.append(
            f"quantize {quantize} needs the package bitsandbytes, which is not installed here: pip install 'fleetune[quant]', "
            "or leave --quantize out"
        )
    return problems


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _check_template(template: str | None) -> None:
    if template is None:
        return
    try:
        Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template {template!r} cannot be read ({error}): give a Jinja file") from None


def _absolute(resolved: Resolved, located: Located | None) -> Resolved:
    """Paths that do not depend on the folder that the command was given in: a run is resumed and read from anywhere."""
    spec = resolved.spec
    weights, rows = spec.weights, spec.rows
    values: dict[str, Any] = {
        "data": [_absolute_path(name) for name in rows.data],
        "validation": [_absolute_path(name) for name in rows.validation],
    }
    if located is not None and located.preset is None:
        values["model"] = _absolute_path(weights.model)
    if weights.chat_template is not None:
        values["chat_template"] = os.path.abspath(weights.chat_template)
    if spec.zero.deepspeed is not None:
        values["deepspeed"] = os.path.abspath(Path(spec.zero.deepspeed).expanduser())
    if spec.output.run is not None:
        values["run"] = os.path.abspath(Path(spec.output.run).expanduser())
    return resolved.with_values(values)


def _absolute_path(name: str) -> str:
    """The absolute path where `name` is a file or folder; a hub id as it is."""
    path = Path(name).expanduser()
    try:
        return os.path.abspath(path) if path.exists() else name
    except OSError:
        return name


def with_plan(resolved: Resolved, plan: Plan) -> Resolved:
    """The spec as it goes into run.yaml: the division of a step as the plan resolved it, so that it stays on resume.

    The accumulation is left open: on another number of processes it is another.
    """
    values = {
        "global_batch_size": plan.batches.global_batch_size,
        "micro_batch_size": plan.batches.micro_batch_size,
        "gradient_accumulation_steps": None,
    }
    if resolved.spec.health.determinism == "strict":
        values["threads"] = 1
    before = resolved.spec.flat()
    return resolved.with_values({name: value for name, value in values.items() if before[name] != value}, origin="plan")
