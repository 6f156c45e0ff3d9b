"""xTuring's two mutable configs. Every key has an effect: each is a field of a run, or of how a reply is drawn."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from fleetune.models.presets import Preset
from fleetune.spec.declared import declared
from fleetune.spec.errors import UserError

#: Key of a finetuning config -> field of the spec.
FINETUNING = {
    "learning_rate": "learning_rate",
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_length": "sequence_length",
    "num_train_epochs": "epochs",
    "warmup_steps": "warmup_steps",
    "weight_decay": "weight_decay",
    "max_grad_norm": "gradient_clip",
    "optimizer_name": "optimizer",
    "eval_steps": "evaluate_every",
    "save_steps": "checkpoint_every",
    "logging_steps": "log_every",
    "save_total_limit": "keep_checkpoints",
    "lora_r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "seed": "seed",
}
#: The folder in which the run folders lie; no field of its own, since each run has a folder.
OUTPUT = "output_dir"
GENERATION = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "penalty_alpha")
_GENERATION_DEFAULTS = {"max_new_tokens": 256, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "penalty_alpha": 0.0}


class Config:
    """Values by attribute. Only keys that mean something can be set: a mistyped one raises UserError.

    changed: the keys whose values are no longer those of the start.
    """

    def __init__(self, values: Mapping[str, Any], what: str) -> None:
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_first", dict(values))
        object.__setattr__(self, "_what", what)

    def __getattr__(self, name: str) -> Any:
        if name in (values := object.__getattribute__(self, "_values")):
            return values[name]
        raise AttributeError(f"a {self._what} has no key {name}: it has {', '.join(values)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            near = difflib.get_close_matches(name, self._values, n=1)
            hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(self._values)}"
            raise UserError(f"a {self._what} has no key {name!r}: {hint}")
        self._values[name] = value

    def __repr__(self) -> str:
        return f"{self._what}({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)

    @property
    def changed(self) -> set[str]:
        return {name for name, value in self._values.items() if value != self._first[name]}

    def update(self, values: Mapping[str, Any]) -> None:
        """Set several keys."""
        for name, value in values.items():
            setattr(self, name, value)


def finetuning_config(preset: Preset) -> Config:
    """The config of a model: its preset's values, and fleetune's own defaults for the rest."""
    values = {key: preset.values.get(field, declared()[field].default) for key, field in FINETUNING.items()}
    return Config({**values, OUTPUT: "saved_model"}, "finetuning config")


def generation_config(preset: Preset) -> Config:
    """How the model replies: by contrastive search, by chance (do_sample), or always with the likeliest token."""
    given = {**_GENERATION_DEFAULTS, **preset.generation}
    values = {"max_new_tokens": given["max_new_tokens"], "do_sample": "temperature" in preset.generation}
    return Config({**values, **{name: given[name] for name in GENERATION if name not in values}}, "generation config")


def fields_of(config: Config, others: set[str]) -> dict[str, Any]:
    """The fields of a run that a finetuning config gives beside its preset. others: keys that count though unchanged."""
    wanted = config.changed | others
    return {field: getattr(config, key) for key, field in FINETUNING.items() if key in wanted}


def drawing_of(config: Config) -> dict[str, Any]:
    """Values of `Sampling` that a generation config gives. Raises UserError for keys that exclude each other."""
    values = config.to_dict()
    length = {"max_new_tokens": values["max_new_tokens"]}
    if values["do_sample"] and values["penalty_alpha"] and "penalty_alpha" in config.changed:
        raise UserError("do_sample draws by chance, and penalty_alpha chooses without: set one of them to nothing")
    if values["do_sample"]:
        return {**length, **{name: values[name] for name in ("temperature", "top_p", "top_k")}}
    if values["penalty_alpha"]:
        return {**length, "penalty_alpha": values["penalty_alpha"], "top_k": values["top_k"]}
    return length
