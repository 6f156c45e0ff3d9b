"""From flags, environment, file and preset to one checked spec, in this order of precedence, with every value's origin."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fleetune.spec import run_spec
from fleetune.spec.convert import convert
from fleetune.spec.declared import Declared, declared
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.given import OF_ONE_START, PREFIX, Source, file_given
from fleetune.spec.records import FORMAT_VERSION
from fleetune.spec.run_folder import RunFolder
from fleetune.spec.run_spec import RunSpec, from_flat
from fleetune.spec.yaml_file import dump, read_document

#: What no run can do without, and how it is asked for.
_REQUIRED = {
    "model": "no model is given: give --model with a preset (see fleetune presets), a hub id, a folder or a .gguf file",
    "data": "no data is given: give --data with a file of rows (jsonl, json, csv, parquet, txt), a folder or a hub data set",
}


@dataclass(frozen=True)
class Resolved:
    """A spec, and where each field's value came from: `flag --seed`, `file run.yaml, line 3`, `default`, `plan`."""

    spec: RunSpec
    origins: dict[str, str]

    def source(self) -> Source:
        """The values of this run as a source for another start of it."""
        values = {name: value for name, value in self.spec.flat().items() if name not in OF_ONE_START}
        return Source("run", values, origins=self.origins)

    def with_values(self, values: Mapping[str, Any], *, origin: str | None = None) -> Resolved:
        """The same run with other values of some fields. origin None keeps what is said of them."""
        spec = from_flat({**self.spec.flat(), **values})
        return Resolved(spec, self.origins if origin is None else {**self.origins, **dict.fromkeys(values, origin)})


@dataclass(frozen=True)
class _Given:
    """One value on its way: as it was given, and from where."""

    name: str
    value: Any
    source: Source

    @property
    def origin(self) -> str:
        return self.source.origin(self.name)


def resolve(
    *,
    flags: Source | None = None,
    environment: Source | None = None,
    file: Source | None = None,
    foreign: Source | None = None,
    earlier: Source | None = None,
    preset: Source | None = None,
    required: Sequence[str] = ("model", "data"),
) -> Resolved:
    """The spec that all sources give together. Raises one UserError with all problems.

    foreign: what another tool's file says that was given for its sake; it and the sources before it must agree, since each
    was given by a person for this run. earlier: the run that is resumed.
    """
    problems: list[str] = []
    chosen: dict[str, _Given] = {}
    for source in (flags, environment, file, foreign, earlier, preset):
        if source is not None:
            higher = {name for name, given in chosen.items() if given.value is not None}
            for name, given in _by_field(source, problems).items():
                if source is foreign and name in chosen:
                    problems += _disagreement(declared()[name], chosen[name], given)
                if not _is_settled(name, higher, chosen, source):
                    chosen.setdefault(name, given)
    values: dict[str, Any] = {}
    for name, given in chosen.items():
        try:
            values[name] = convert(declared()[name], given.value)
        except ValueError as error:
            problems.append(_refusal(declared()[name], given, str(error)))
    wrong = set(chosen) - set(values)
    _spell_out_qlora(values, chosen, problems)
    spec = _checked(values, chosen, problems)
    problems += [_REQUIRED[name] for name in required if not values.get(name) and name not in wrong]
    raise_if_any(problems)
    assert spec is not None
    return Resolved(spec, {name: chosen[name].origin if name in chosen else "default" for name in declared()})


#: Two names of one thing: what a higher source says by one of them, a lower one cannot say by the other.
_INSTEAD = {"warmup": "warmup_steps", "warmup_steps": "warmup"}
_DIVISION = {"global_batch_size", "micro_batch_size", "gradient_accumulation_steps"}


def _is_settled(name: str, higher: set[str], chosen: Mapping[str, _Given], source: Source) -> bool:
    """Whether higher sources have said already what `name` would say. Of a step's three numbers a preset fills two at most."""
    if source.kind == "preset" and name in _DIVISION and _DIVISION & higher:
        return len(_DIVISION & set(chosen)) >= 2
    return _INSTEAD.get(name) in higher


def _spell_out_qlora(values: dict[str, Any], chosen: dict[str, _Given], problems: list[str]) -> None:
    """`method qlora` becomes `method lora` with `quantize nf4`: one thing has one name in a run."""
    if values.get("method") != "qlora":
        return
    asked = values.get("quantize", "nf4")
    if asked != "nf4":
        problems.append(
            f"method qlora ({chosen['method'].origin}) is lora on an nf4 base, and quantize is {asked} "
            f"({chosen['quantize'].origin}): give --method lora --quantize {asked}, or leave --quantize out"
        )
    values.update(method="lora", quantize="nf4")
    chosen.setdefault("quantize", chosen["method"])


#: Fields that take MIN:MAX -> the field of the lesser number.
_RANGES = {"gpus": "min_gpus"}


def _ranges_split(source: Source) -> dict[str, Any]:
    """What a source gives, with `gpus: MIN:MAX` as the two fields it stands for; after `gpus: N` no lesser number will do."""
    plain = {name: name.lstrip("-").replace("-", "_") for name in source.values}
    split = dict(source.values)
    for name, value in source.values.items():
        least = _RANGES.get(run_spec.aliases().get(plain[name], plain[name]))
        if least is not None and least not in plain.values():
            # In YAML, 2:4 without quotes is a number of minutes.
            low, colon, high = str(source.texts.get(name, value)).partition(":")
            split[name], split[least] = (high, low) if colon else (value, None)
    return split


def _by_field(source: Source, problems: list[str]) -> dict[str, _Given]:
    """What a source gives, by field name; names that no field has, or that two give, become problems."""
    found: dict[str, _Given] = {}
    for name, value in _ranges_split(source).items():
        plain = name.lstrip("-").replace("-", "_")
        target = plain if plain in declared() else run_spec.aliases().get(plain)
        if target is None:
            problems.append(unknown_name(source, name))
            continue
        if declared()[target].kind in ("text", "choice") and isinstance(value, (bool, int, float)):
            value = source.texts.get(name, value)
        given = _Given(name, value, source)
        if target in found and found[target].value != value:
            other = found[target]
            problems.append(
                f"{source.spelled(other.name)} {other.value!r} and {source.spelled(name)} {value!r} "
                f"({given.origin}) are two names of one thing: give one of them"
            )
        found[target] = given
    return found


def unknown_name(source: Source, name: str) -> str:
    """What is said of a name that no field has: with the nearest that there is."""
    plain = name.lstrip("-").replace("-", "_")
    if source.kind == "preset":
        return f"preset {source.name} asks for {name} {source.values[name]!r}, which this fleetune cannot do: take another"
    if plain in run_spec.sections():
        return f"{plain} ({source.origin(name)}) is a section, and settings are written flat: leave the section out"
    near = nearest(plain)
    where = f" ({source.origin(name)})" if source.kind == "file" else ""
    if near:
        hint = f"did you mean {source.spelled(near)}?"
    elif source.kind == "environment":
        hint = f"variables that begin with {PREFIX} are settings: unset it"
    else:
        hint = "see fleetune train --help for all of them"
    return f"there is no {source.what()} {source.spelled(name)}{where}: {hint}"


#: What other tools call a thing that is not quite ours: a hint only, never accepted.
_OTHER_WORDS = {
    "lr": "learning_rate",
    "bs": "micro_batch_size",
    "output": "run",
    "output_dir": "run",
    "num_train_epochs": "epochs",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup",
    "max_grad_norm": "gradient_clip",
    "target_modules": "lora_targets",
    "val_set_size": "validation_share",
    "eval_dataset": "validation",
    "eval_steps": "evaluate_every",
    "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints",
    "nproc_per_node": "gpus",
    "num_train_steps": "max_steps",
}


def nearest(name: str) -> str | None:
    """The name of a field (or another tool's name of one) that a person who wrote `name` may have meant."""
    shown = [field.shown for field in declared().values()]
    if name in _OTHER_WORDS:
        return _OTHER_WORDS[name]
    for candidate in shown:
        if name == candidate.rpartition("_")[2]:
            return candidate
    near = difflib.get_close_matches(name, [*shown, *run_spec.aliases()], n=1, cutoff=0.65)
    return near[0] if near else None


def _disagreement(field: Declared, first: _Given, second: _Given) -> list[str]:
    """What is said where two files, or a flag and a file, say different things of one field."""
    try:
        if convert(field, first.value) == convert(field, second.value):
            return []
    except ValueError:
        pass  # told as a refusal, or by the spec
    return [
        f"{field.shown} is {_spoken(first.value)} ({first.origin}) and {_spoken(second.value)} ({second.origin}): leave one of "
        "them out, or make them equal"
    ]


def _refusal(field: Declared, given: _Given, complaint: str) -> str:
    hint = ""
    if field.kind == "choice" and isinstance(given.value, str):
        near = difflib.get_close_matches(given.value.lower(), field.choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
    give = f"give {field.allowed()}"
    return f"{field.shown} {_spoken(given.value)} ({given.origin}) {complaint}: {hint}{give if not hint else give.capitalize()}"


def _spoken(value: Any) -> str:
    if value is None:
        return "(nothing)"
    text = repr(value) if isinstance(value, (str, list, tuple, dict)) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _checked(values: dict[str, Any], chosen: Mapping[str, _Given], problems: list[str]) -> RunSpec | None:
    """The spec of converted values; what it refuses is told in the words of the fields."""
    try:
        return from_flat(values)
    except ValidationError as error:
        for entry in error.errors():
            name = str(entry["loc"][-1]) if entry["loc"] else ""
            cause = entry.get("ctx", {}).get("error")
            if name in chosen:
                complaint = str(cause) if cause is not None else "is out of range"
                problems.append(_refusal(declared()[name], chosen[name], complaint))
            else:
                problems += str(cause or entry["msg"]).splitlines()
        return None


def write_run(folder: RunFolder, resolved: Resolved) -> None:
    """Write `run.yaml` (mode 0600), aside and renamed. The folder must be there. It never holds a secret: no field is one."""
    values = {name: value for name, value in resolved.spec.flat().items()}
    text = "# The run as it was resolved, and where each value came from. `fleetune train` reads this file too.\n"
    text += dump({"version": FORMAT_VERSION, "values": values, "origins": resolved.origins})
    temporary = folder.spec.with_name(f".run.yaml.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder.spec)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_run(folder: RunFolder) -> Resolved:
    """What `write_run` wrote. Raises UserError where the file is absent, damaged or of another version."""
    return read_resolved(folder.spec)


def read_resolved(path: Path) -> Resolved:
    """The resolved run in a run.yaml."""
    document = read_document(path)
    origins = document.values.get("origins")
    if not isinstance(origins, dict) or "values" not in document.values:
        raise UserError(f"{path} is no run.yaml of a run folder: give a run that fleetune train made")
    source = file_given(path)
    written = document.values["values"]
    kept = {name: written[name] for name in OF_ONE_START if name in written}
    spec = resolve(file=Source("file", {**source.values, **kept}, name=str(path)), required=()).spec
    return Resolved(spec, {name: str(origins.get(name, "default")) for name in declared()})
