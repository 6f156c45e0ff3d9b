"""DeepSpeed's own JSON in a start: read beside the other sources, told about, and kept in the run folder."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from fleetune.models.presets import Preset
from fleetune.planning.zero import is_deepspeed, zero_of
from fleetune.spec.deepspeed_file import DeepSpeedFile, read_deepspeed
from fleetune.spec.given import Source
from fleetune.spec.read import Resolved
from fleetune.spec.run_spec import RunSpec

#: Settings that say which engine keeps the training state, and how.
_OF_DEEPSPEED = ("use_deepspeed", "deepspeed", "zero_stage", "offload")
_COMPILERS = ("c++", "g++", "clang++")


def read_foreign(first: RunSpec, earlier: Resolved | None) -> DeepSpeedFile | None:
    """The file that this start names, else the one of the run that it goes on with. Raises UserError."""
    path = first.zero.deepspeed
    if path is None and earlier is not None and first.zero.engine != "native":
        path = earlier.spec.zero.deepspeed
    return None if path is None else read_deepspeed(Path(path).expanduser())


def earlier_source(earlier: Resolved, first: RunSpec) -> Source:
    """What a resumed run said, without what this start takes back: an engine that it names, or DeepSpeed that it asks for."""
    source = earlier.source()
    values = dict(source.values)
    if first.zero.engine == "native":
        for name in _OF_DEEPSPEED:
            values.pop(name, None)
    elif is_deepspeed(first) and values.get("engine") == "native":
        values.pop("engine")
    return Source(source.kind, values, origins=source.origins)


def foreign_notes(found: DeepSpeedFile | None, preset: Preset | None) -> tuple[str, ...]:
    """What a person should know: what of the file has no effect, and where it overrides the model's preset."""
    if found is None:
        return ()
    values: dict[str, Any] = dict(found.source.values)
    over = [
        f"{name} {values[name]} ({found.source.origin(name)}) takes the place of the preset's {preset.values[name]}"
        for name in (values if preset else ())
        if preset is not None and name in preset.values and preset.values[name] != values[name]
    ]
    return (*found.notes, *over)


def absent_for_deepspeed(spec: RunSpec) -> list[str]:
    """What DeepSpeed needs and is not here; it is not imported."""
    if not is_deepspeed(spec):
        return []
    problems = []
    if importlib.util.find_spec("deepspeed") is None:
        problems.append(
            "DeepSpeed is asked for, and the package deepspeed is not installed here: pip install 'fleetune[deepspeed]', or "
            "leave out what asks for it"
        )
    is_compiled = spec.optimization.optimizer == "cpu_adam" and zero_of(spec).offload != "none"
    if is_compiled and not any(shutil.which(name) for name in _COMPILERS):
        problems.append(
            "optimizer cpu_adam under DeepSpeed is compiled at its first use, and no C++ compiler is installed here: install "
            "g++, or give --optimizer adamw --offload optimizer"
        )
    return problems


def keep(spec: RunSpec, folder: Path) -> dict[str, Any]:
    """Copy the file into the run folder, so that the run's processes and a resumed run read what was checked; returns the
    values of the spec that name it."""
    path = spec.zero.deepspeed
    if path is None:
        return {}
    kept = folder / "deepspeed.json"
    if not kept.exists() or not kept.samefile(Path(path).expanduser()):
        shutil.copyfile(Path(path).expanduser(), kept)
    return {"deepspeed": str(kept)}
