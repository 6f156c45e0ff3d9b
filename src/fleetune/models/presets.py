"""Presets: short names of models, with the defaults that suit them. Data in `presets/*.yaml`; no torch here.

A preset says where the weights are (a hub id, or a file inside an installed package) and may give defaults for fields of
the spec, below everything that a person gives. Names are compared without regard to case, `_` being the same as `-`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import yaml


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
    """One preset. hub: `ORG/NAME`. values: defaults by field name of the spec. origin: where the values come from."""

    name: str
    about: str
    hub: str
    revision: str | None
    package: PackageFile | None
    origin: str
    values: dict[str, Any] = field(default_factory=dict)


def find_preset(name: str) -> Preset | None:
    """The preset of that name, or None."""
    return _presets().get(_key(name))


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
    for name, entry in (yaml.safe_load(text) or {}).items():
        unknown = sorted(set(entry) - {"about", "hub", "package", "values", "origin"})
        missing = sorted({"about", "hub", "origin"} - set(entry))
        if unknown or missing:
            raise ValueError(f"{where}: preset {name} has unknown keys {unknown} and lacks {missing}")
        hub, _, revision = entry["hub"].partition("@")
        package = PackageFile(**entry["package"]) if "package" in entry else None
        values = dict(entry.get("values") or {})
        yield Preset(name, entry["about"], hub, revision or None, package, entry["origin"].strip(), values)


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")


@cache
def _presets() -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    folder = resources.files("fleetune.models").joinpath("presets")
    for file in sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name):
        for preset in read_presets(file.read_text(encoding="utf-8"), file.name):
            if _key(preset.name) in found:
                raise ValueError(f"{file.name}: there are two presets {preset.name}")
            found[_key(preset.name)] = preset
    return found
