"""A person's own DeepSpeed JSON, taken as it is: what it says of a run becomes values of the spec, the rest goes to DeepSpeed.

Nothing of it is dropped without a word: a setting is translated, handed on, named in a note, or refused with the reason. The
value `auto`, as other trainers know it, leaves the choice to fleetune.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetune.spec.deepspeed_keys import NEUTRAL, OFFLOAD_PASSED, PASSED, REFUSED, WITHOUT_EFFECT, ZERO_PASSED
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.given import Source

AUTO = "auto"
_MAX_BYTES = 1 << 20
_NUMBERS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clip",
}
_SECTIONS = ("optimizer", "zero_optimization", "fp16", "bf16", "bfloat16")
_OPTIMIZER = {"lr": "learning_rate", "eps": "epsilon", "weight_decay": "weight_decay"}
#: What fleetune's own loss scaling takes from `fp16`.
SCALING: dict[str, type] = {"loss_scale": float, "initial_scale_power": int, "loss_scale_window": int, "min_loss_scale": float}
_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "an object"}


@dataclass(frozen=True)
class DeepSpeedFile:
    """source: what it says of the run, as values of the spec. options: what DeepSpeed gets, and `fp16` for the loss scale.

    notes: what a person should know of settings that have no effect, or another one.
    """

    source: Source
    options: dict[str, Any]
    notes: tuple[str, ...]


def read_deepspeed(path: Path) -> DeepSpeedFile:
    """Read and translate a file. Raises UserError with everything that is wrong in it."""
    return _Translation(str(path), _load(path)).result()


def _load(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()[: _MAX_BYTES + 1]
    except OSError as error:
        raise UserError(f"deepspeed {str(path)!r} cannot be read ({error.strerror}): give DeepSpeed's JSON file") from None
    if len(data) > _MAX_BYTES:
        raise UserError(f"deepspeed {str(path)!r} is larger than 1 MiB: give DeepSpeed's JSON file")
    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once)
    except _Twice as twice:
        raise UserError(f"{path} has {twice} twice in one object: leave one of them out") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}): mend it there") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no object of settings: give DeepSpeed's JSON file")
    return found


class _Twice(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise _Twice(key)
    return dict(pairs)


@dataclass
class _Translation:
    """One file on its way. found: values of the spec; places: where in the file each stands."""

    name: str
    settings: Mapping[str, Any]
    found: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def result(self) -> DeepSpeedFile:
        for key, value in self.settings.items():
            if key in _NUMBERS:
                self._give(_NUMBERS[key], value, key)
            elif key not in _SECTIONS:
                self._take(key, value, PASSED, self.options, known=(*_NUMBERS, *_SECTIONS))
        for section, read in (("optimizer", self._optimizer), ("zero_optimization", self._zero), ("fp16", self._fp16)):
            if (values := self._section(section)) is not None:
                read(values)
        for section in ("bf16", "bfloat16"):
            if (values := self._section(section)) is not None:
                self._bf16(section, values)
        raise_if_any(self.problems)
        return DeepSpeedFile(
            Source("file", self.found, name=self.name, places=self.places), self.options, tuple(dict.fromkeys(self.notes))
        )

    def _section(self, name: str) -> Mapping[str, Any] | None:
        values = self.settings.get(name)
        if values is None:
            return None
        if not isinstance(values, dict):
            self.problems.append(f"{self._at(name)} is {_said(values)}: give an object")
            return None
        return values

    def _optimizer(self, values: Mapping[str, Any]) -> None:
        kind = values.get("type", "AdamW")
        parameters = values.get("params") or {}
        if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw") or not isinstance(parameters, dict):
            self.problems.append(
                f"{self._at('optimizer')} is {_said(kind)}, and fleetune's optimizer with DeepSpeed is AdamW: write "
                '"type": "AdamW" with "params" as an object, or leave the optimizer out'
            )
            return
        if kind.lower() == "adam" and parameters.get("adam_w_mode", True) is False:
            self._give("optimizer", "adam", "optimizer.params.adam_w_mode")
        for key, value in parameters.items():
            place = f"optimizer.params.{key}"
            if key in _OPTIMIZER:
                self._give(_OPTIMIZER[key], value, place)
            elif key == "betas":
                self._betas(value, place)
            else:
                self._take(place, value, {}, {}, known=tuple(f"optimizer.params.{name}" for name in (*_OPTIMIZER, "betas")))
        for key in values.keys() - {"type", "params"}:
            self._take(f"optimizer.{key}", values[key], {}, {}, known=("optimizer.type", "optimizer.params"))
        if parameters.get("weight_decay") not in (None, AUTO, 0, 0.0):
            self.notes.append(f"{self._at('optimizer.params.weight_decay')} decays matrices, never biases and norms")

    def _betas(self, value: Any, place: str) -> None:
        if value == AUTO:
            return
        if not isinstance(value, list) or len(value) != 2:
            self.problems.append(f"{self._at(place)} is {_said(value)}: give two numbers, as [0.9, 0.999]")
            return
        for name, beta in zip(("beta1", "beta2"), value):
            self._give(name, beta, place)

    def _zero(self, values: Mapping[str, Any]) -> None:
        partition: dict[str, Any] = {}
        for key, value in values.items():
            if key == "stage":
                self._give("zero_stage", value, "zero_optimization.stage")
            elif key not in ("offload_optimizer", "offload_param"):
                self._take(f"zero_optimization.{key}", value, ZERO_PASSED, partition, known=("zero_optimization.stage",))
        devices = {key: self._offload(key, values.get(key), partition) for key in ("offload_optimizer", "offload_param")}
        if devices["offload_param"] == "cpu":
            self._give("offload", "parameters", "zero_optimization.offload_param")
        elif devices["offload_optimizer"] == "cpu":
            self._give("offload", "optimizer", "zero_optimization.offload_optimizer")
        if devices["offload_param"] == "cpu" and devices["offload_optimizer"] != "cpu":
            self.notes.append(f"{self._at('zero_optimization.offload_param')} offloads the optimizer's state as well")
        if partition:
            self.options["zero_optimization"] = partition

    def _offload(self, key: str, values: Any, partition: dict[str, Any]) -> str | None:
        if values is None:
            return None
        place = f"zero_optimization.{key}"
        if not isinstance(values, dict):
            self.problems.append(f'{self._at(place)} is {_said(values)}: give an object, as {{"device": "cpu"}}')
            return None
        kept: dict[str, Any] = {}
        for name in values.keys() - {"device"}:
            self._take(f"{place}.{name}", values[name], OFFLOAD_PASSED, kept, known=(f"{place}.device",))
        if kept:
            partition[key] = kept
        device = values.get("device", "none")
        if device not in ("cpu", "none", None):
            self.problems.append(
                f"{self._at(f'{place}.device')} is {_said(device)}, and fleetune's checkpoints reach what is in host memory: "
                'write "cpu", or "none"'
            )
        return device if isinstance(device, str) else None

    def _fp16(self, values: Mapping[str, Any]) -> None:
        kept: dict[str, Any] = {}
        for key in values.keys() - {"enabled"}:
            self._take(f"fp16.{key}", values[key], SCALING, kept, known=("fp16.enabled",))
        if self._enabled("fp16", values) is True:
            self._give("precision", "fp16", "fp16.enabled")
            if kept:
                self.options["fp16"] = kept

    def _bf16(self, section: str, values: Mapping[str, Any]) -> None:
        for key in values.keys() - {"enabled"}:
            self._take(f"bf16.{key}", values[key], {}, {}, known=("bf16.enabled",))
        if self._enabled(section, values) is not True:
            return
        if self.found.get("precision") == "fp16":
            self.problems.append(
                f"{self._at(f'{section}.enabled')} and fp16.enabled are both true, and a forward has one precision: enable one"
            )
        self._give("precision", "bf16", f"{section}.enabled")

    def _enabled(self, section: str, values: Mapping[str, Any]) -> Any:
        enabled = values.get("enabled", False)
        if not isinstance(enabled, bool) and enabled != AUTO:
            self.problems.append(f"{self._at(f'{section}.enabled')} is {_said(enabled)}: give true or false")
        return enabled

    def _give(self, name: str, value: Any, place: str) -> None:
        """A value of the spec; whether it can be one is checked with all others."""
        if value != AUTO:
            self.found[name], self.places[name] = value, place

    def _take(
        self, place: str, value: Any, passed: Mapping[str, type], into: dict[str, Any], *, known: tuple[str, ...]
    ) -> None:
        """A setting that no field of the spec has."""
        key = place.rpartition(".")[2]
        if key in passed:
            if value == AUTO:
                return
            if _is_a(value, passed[key]):
                into[key] = value
            else:
                self.problems.append(f"{self._at(place)} is {_said(value)}: give {_TYPES[passed[key]]}")
        elif place in WITHOUT_EFFECT:
            self.notes.append(f"{self._at(place)} has no effect: {WITHOUT_EFFECT[place]}")
        elif place in REFUSED:
            if not _is_off(value) and value not in NEUTRAL.get(place, ()):
                why, mend = REFUSED[place]
                self.problems.append(f"{self._at(place)} is not taken: {why}; {mend}")
        else:
            names = [*known, *_names_beside(place, passed)]
            near = difflib.get_close_matches(place, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            self.problems.append(f"DeepSpeed has no setting {place} (file {self.name}): {hint}")

    def _at(self, place: str) -> str:
        return f"{place} (file {self.name})"


def _names_beside(place: str, passed: Mapping[str, type]) -> Iterator[str]:
    stem = place.rpartition(".")[0]
    yield from (f"{stem}.{key}" if stem else key for key in passed)
    yield from (name for name in (*WITHOUT_EFFECT, *REFUSED) if name.rpartition(".")[0] == stem)


def _is_a(value: Any, kind: type) -> bool:
    """Numbers may be written as 5e8; true is no number."""
    if kind in (int, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and (kind is float or value == int(value))
    return isinstance(value, kind)


def _is_off(value: Any) -> bool:
    """Whether a setting asks for nothing: off, absent, or an object whose `enabled` is false."""
    return value in (False, None, AUTO, 0, {}) or (isinstance(value, dict) and value.get("enabled", None) is False)


def _said(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
