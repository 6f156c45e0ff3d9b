"""Presets: short names of models, with the defaults that suit them. Data in `presets/*.yaml`; no torch here.

A preset says where the weights are (a hub id, or a file inside an installed package) and may give defaults for fields of
the spec, below everything that a person gives. Names are compared without regard to case, `_` being the same as `-`.

A suffix says how a model is trained: `NAME_lora`, `NAME_int8`, `NAME_lora_int8` (an adapter on a base in 8 bits) and
`NAME_lora_kbit` (in 4). A preset that names its variants has those and no others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from fleetune.spec.errors import UserError
from fleetune.spec.yaml_file import parse

#: What each suffix asks for, longest first.
SUFFIXES: dict[str, dict[str, Any]] = {
    "lora_int8": {"method": "lora", "quantize": "int8"},
    "lora_kbit": {"method": "lora", "quantize": "nf4"},
    "lora": {"method": "lora"},
    "int8": {"quantize": "int8"},
}
_KEYS = {"about", "hub", "package", "values", "generation", "variants", "origin"}


@dataclass(frozen=True)
class PackageFile:
    """Weights inside an installed package, which is never imported. install: the line that installs it."""

    name: str
    version: str
    file: str
    install: str

    def find(self) -> Path | None:
        """The file, or None where the package is absent or does not hold it."""
        try:
            path = Path(str(metadata.distribution(self.name).locate_file(self.file)))
        except metadata.PackageNotFoundError:
            return None
        return path if path.is_file() else None

    def installed_version(self) -> str:
        return metadata.version(self.name)


@dataclass(frozen=True)
class Preset:
    """One preset. hub: `ORG/NAME`, or None for values alone. values: defaults by field name of the spec.

    generation: how a reply is drawn, by name. is_open: any suffix may follow its name. origin: where the values come from.
    """

    name: str
    about: str
    hub: str | None
    revision: str | None
    package: PackageFile | None
    origin: str
    values: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    is_open: bool = False


@dataclass(frozen=True)
class Moved:
    """A name that was. to: what it is called now, or None where there is no such thing any more."""

    name: str
    to: str | None
    why: str


def find_preset(name: str) -> Preset | None:
    """The preset of that name, or None. A name with a suffix that its preset leaves open is found too."""
    presets, key = _presets(), _key(name)
    if key in presets:
        return presets[key]
    for suffix, asked in SUFFIXES.items():
        stem = key.removesuffix(f"-{_key(suffix)}")
        if stem != key:
            parent = presets.get(stem)
            if parent is None or not parent.is_open:
                return None
            return _variant(parent, suffix, {**parent.values, **asked}, parent.generation)
    return None


def find_moved(name: str) -> Moved | None:
    """What became of a name that was a preset once, here or in the programs whose words are understood."""
    return _moved().get(_key(name))


def refuse_moved(name: str) -> None:
    """Raise UserError for a name that has moved, saying where to."""
    moved = find_moved(name)
    if moved is not None:
        now = f"it is {moved.to} now: give that" if moved.to else "give a language model (fleetune presets)"
        raise UserError(f"there is no preset {name!r} ({moved.why}): {now}")


def all_presets() -> list[Preset]:
    """All presets by name."""
    return sorted(_presets().values(), key=lambda preset: preset.name)


def similar_presets(name: str) -> list[str]:
    """Names that a person who wrote `name` may have meant, the nearest first."""
    presets = _presets()
    near = difflib.get_close_matches(_key(name.rpartition("/")[2]), presets, n=3, cutoff=0.6)
    return [presets[key].name for key in near]


def read_presets(text: str, where: str) -> Iterator[Preset]:
    """The presets of one YAML text. Raises ValueError, naming `where`, for what is no preset."""
    entries = parse(text, where).values
    defaults = entries.get("_defaults") or {}
    for name, entry in entries.items():
        if name.startswith("_"):
            continue
        entry = {**({"origin": defaults["origin"]} if "origin" in defaults else {}), **entry}
        unknown = sorted(set(entry) - _KEYS)
        missing = sorted({"about", "origin"} - set(entry))
        if unknown or missing:
            raise ValueError(f"{where}: preset {name} has unknown keys {unknown} and lacks {missing}")
        hub, _, revision = (entry.get("hub") or "").partition("@")
        package = PackageFile(**entry["package"]) if "package" in entry else None
        common = dict(defaults.get("values") or {})
        generation = {**(defaults.get("generation") or {})}
        preset = Preset(
            name=name,
            about=entry["about"],
            hub=hub or None,
            revision=revision or None,
            package=package,
            origin=entry["origin"].strip(),
            values={**common, **(entry.get("values") or {})},
            generation={**generation, **(entry.get("generation") or {})},
            is_open="variants" not in entry,
        )
        yield preset
        for suffix, variant in (entry.get("variants") or {}).items():
            adapter = (defaults.get("lora") or {}) if suffix.startswith("lora") else {}
            # A quantised variant that gives nothing of its own is the adapter's variant on another base.
            like = _values_of(entry, "lora") if suffix.startswith("lora_") and not variant else {}
            values = {**common, **SUFFIXES[suffix], **adapter, **like, **_values_of(entry, suffix)}
            yield _variant(preset, suffix, values, {**generation, **((variant or {}).get("generation") or {})})


def _values_of(entry: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    return dict(((entry["variants"].get(suffix) or {}).get("values")) or {})


def _variant(preset: Preset, suffix: str, values: dict[str, Any], generation: dict[str, Any]) -> Preset:
    """NAME_SUFFIX: in the spelling of its preset's name."""
    joined = f"{preset.name}_{suffix}" if "-" not in preset.name else f"{preset.name}-{suffix.replace('_', '-')}"
    said = {"lora": "LoRA", "int8": "weights in 8 bits", "lora_int8": "LoRA on 8 bits", "lora_kbit": "LoRA on 4 bits"}
    about = f"{preset.about}: {said[suffix]}"
    return replace(preset, name=joined, about=about, values=values, generation=generation, is_open=False)


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


def _texts() -> Iterator[tuple[str, str]]:
    """(name, text) of every preset file."""
    folder = resources.files("fleetune.models").joinpath("presets")
    for file in sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name):
        yield file.name, file.read_text(encoding="utf-8")


@cache
def _presets() -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for name, text in _texts():
        for preset in read_presets(text, name):
            if _key(preset.name) in found:
                raise ValueError(f"{name}: there are two presets {preset.name}")
            found[_key(preset.name)] = preset
    return found


@cache
def _moved() -> dict[str, Moved]:
    entries = [(parse(text, name).values.get("_moved") or {}).items() for name, text in _texts()]
    return {_key(name): Moved(name, entry.get("to"), entry["why"]) for group in entries for name, entry in group}
