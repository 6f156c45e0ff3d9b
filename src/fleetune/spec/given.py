"""Values as somebody gave them, and how to speak of where each came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fleetune.spec.errors import UserError
from fleetune.spec.records import FORMAT_VERSION
from fleetune.spec.yaml_file import read_document

PREFIX = "FLEETUNE_"
#: Variables of ours that are no fields of the spec: where caches are, and what our processes tell each other.
NOT_FIELDS = ("FLEETUNE_CACHE", "FLEETUNE_TEST_CACHE", "FLEETUNE_LIFELINE_FD", "FLEETUNE_REPORT_FD", "FLEETUNE_STORE")
#: Fields that say how this one start is made; a run does not keep them.
OF_ONE_START = ("resume", "json_output")


@dataclass(frozen=True)
class Source:
    """One place that values come from. values: by name as it was written there.

    name: of the file or preset. lines: name -> line of the file. texts: name -> an unquoted value as it was written, for
    fields that are text (`revision: 0123` is no number). origins: name -> origin, of a run that is resumed. places: name ->
    where another tool's file has it, `optimizer.params.lr`.
    """

    kind: Literal["flag", "argument", "environment", "file", "run", "preset"]
    values: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Where the value under `name` stands: `flag --seed`, `file run.yaml, line 3`."""
        if name in self.places:
            return f"file {self.name}, {self.places[name]}"
        if self.kind == "file":
            return f"file {self.name}" + (f", line {self.lines[name]}" if name in self.lines else "")
        if self.kind == "run":
            first = self.origins.get(name, "default")
            return f"earlier {first}" if first.startswith(("flag ", "argument ", "environment ")) else first
        if self.kind == "preset":
            return f"preset {self.name}"
        return f"{self.kind} {self.spelled(name)}"

    def spelled(self, name: str) -> str:
        """How a field (or another name of it) is written here."""
        if self.kind == "flag":
            return "--" + name.removeprefix("--").replace("_", "-")
        return PREFIX + name.upper().replace("-", "_") if self.kind == "environment" else name

    def what(self) -> str:
        """What a name is here."""
        return self.kind if self.kind in ("flag", "argument") else "setting"


def flags_given(values: Mapping[str, Any]) -> Source:
    """Flags of a command line, by name with or without dashes in front."""
    return Source("flag", values)


def arguments_given(values: Mapping[str, Any]) -> Source:
    """Arguments of the Python functions."""
    return Source("argument", values)


def environment_given(environment: Mapping[str, str]) -> Source:
    """The variables `FLEETUNE_<NAME>` of an environment; an empty one counts as not set."""
    found = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in NOT_FIELDS and value != ""
    }
    return Source("environment", found)


def file_given(path: Path) -> Source:
    """A person's RUN.yaml (flat), or the run.yaml of a run folder. Raises UserError."""
    document = read_document(path)
    values = document.values
    if set(values) == {"version", "values", "origins"}:
        if values["version"] != FORMAT_VERSION:
            raise UserError(
                f"{path} has format version {values['version']!r}, and this fleetune reads {FORMAT_VERSION}: use the fleetune "
                "that wrote it"
            )
        if not isinstance(values["values"], dict):
            raise UserError(f"{path} holds no values: give another file")
        kept = {name: value for name, value in values["values"].items() if name not in OF_ONE_START}
        return Source("file", kept, name=str(path))
    return Source("file", values, name=str(path), lines=document.lines, texts=document.texts)


def preset_given(name: str, values: Mapping[str, Any]) -> Source:
    """The values of a preset."""
    return Source("preset", values, name=name)
