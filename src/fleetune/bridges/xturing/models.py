"""xTuring's models: by key (`create_model("llama2_lora")`) or by name of a class (`GPTOSS20B()`).

A model is a preset and the weights it begins with, then the run that has trained them. `finetune` is `fleetune.train`.
"""

from __future__ import annotations

import difflib
import os
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from fleetune.bridges.xturing.config import (
    OUTPUT,
    Config,
    drawing_of,
    fields_of,
    finetuning_config,
    generation_config,
)
from fleetune.bridges.xturing.datasets import fields_of as rows_of
from fleetune.models.presets import Preset, find_preset, refuse_moved, similar_presets
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_json, write_json

_SAVED = "xturing.json"
#: Class name in xTuring -> family; a suffix says how it is trained.
CLASSES = {
    "Bloom": "bloom",
    "Cerebras": "cerebras",
    "DistilGPT2": "distilgpt2",
    "Falcon": "falcon",
    "Galactica": "galactica",
    "GPT2": "gpt2",
    "GPTJ": "gptj",
    "GPTOSS20B": "gpt_oss_20b",
    "GPTOSS120B": "gpt_oss_120b",
    "Llama": "llama",
    "Llama2": "llama2",
    "Mamba": "mamba",
    "MiniMaxM2": "minimax_m2",
    "Mistral": "mistral_7b",
    "OPT": "opt",
    "Qwen3": "qwen3_0_6b",
}
_SUFFIXES = {"": "", "Lora": "_lora", "Int8": "_int8", "LoraInt8": "_lora_int8", "LoraKbit": "_lora_kbit"}


@final
class Model:
    """One model. key: the preset's name. weights_path: other weights than the preset's, by whatever names a model."""

    def __init__(self, key: str, weights_path: str | os.PathLike[str] | None = None) -> None:
        self.key = key
        self._preset = _preset(key)
        if weights_path is None and self._preset.hub is None:
            raise UserError(f"{key} is values for any model: give weights_path, as a hub id or a folder")
        self._start = os.fspath(weights_path) if weights_path is not None else key
        self._run: Path | None = None
        self._finetuning = finetuning_config(self._preset)
        self._generation = generation_config(self._preset)
        self._generator: Any = None

    def __repr__(self) -> str:
        return f"Model({self.key!r}, {self.weights!r})"

    @staticmethod
    def create(key: str, weights_path: str | os.PathLike[str] | None = None) -> Model:
        """The model of a key (`fleetune presets` lists them)."""
        return Model(key, weights_path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Model:
        """A model that `save` wrote."""
        folder = Path(path).expanduser()
        if not (folder / _SAVED).is_file():
            raise UserError(
                f"{folder} was not written by save (it has no {_SAVED}): give create(key, weights_path) its weights"
            )
        saved = read_json(folder / _SAVED)
        model = Model(str(saved["model_name"]), folder)
        model._finetuning.update(saved["finetuning_config"])
        model._generation.update(saved["generation_config"])
        return model

    @property
    def preset_values(self) -> dict[str, Any]:
        """The defaults of its preset, by field of a run."""
        return self._preset.values

    @property
    def weights(self) -> str:
        """What the next `finetune`, `generate` and `evaluate` begin with: the last run, or else what it was created with."""
        return str(self._run) if self._run is not None else self._start

    def finetuning_config(self) -> Config:
        """The values of the training, which may be set: `model.finetuning_config().num_train_epochs = 1`."""
        return self._finetuning

    def generation_config(self) -> Config:
        """How the model replies; it may be set too."""
        return self._generation

    def finetune(
        self,
        dataset: Any,
        logger: Any = False,
        *,
        use_deepspeed: bool = False,
        deepspeed_config_path: str | os.PathLike[str] | None = None,
        num_gpus: int | None = None,
        validation: Any = None,
        **fields: Any,
    ) -> Any:
        """Train on `dataset`; returns the finished `fleetune.Run`. num_gpus: processes in all, over all nodes.

        logger: True for TensorBoard, or a logger whose class name says which tracker. validation: held-out rows, in any form
        that `dataset` takes. fields: further fields of `fleetune.train`. Raises UserError with all problems.
        """
        import fleetune

        asked: dict[str, Any] = {"model": self.weights, "preset": self.key, **rows_of(dataset)}
        asked |= fields_of(self._finetuning, set())
        asked.setdefault("run", _new_folder(Path(getattr(self._finetuning, OUTPUT)), self.key))
        if validation is not None:
            asked["validation"] = rows_of(validation)["data"]
        if use_deepspeed:
            asked["use_deepspeed"] = True
        if deepspeed_config_path is not None:
            asked["deepspeed"] = os.fspath(deepspeed_config_path)
        if num_gpus is not None:
            asked["gpus"] = num_gpus
        run = fleetune.train(**{**asked, **_tracker(logger), **fields})
        self._run, self._generator = run.folder, None
        return run

    def generate(self, texts: str | list[str] | None = None, dataset: Any = None, batch_size: int = 1) -> list[str]:
        """Replies to texts, or to the rows of a data set (its prompts). batch_size: texts that are read at once."""
        from fleetune.training.generation import Sampling

        if (texts is None) == (dataset is None):
            raise UserError("generate needs texts or a dataset: give one of them")
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size} is no number of texts: give 1 or more")
        asked = [texts] if isinstance(texts, str) else list(texts) if texts is not None else _prompts(dataset)
        sampling = Sampling(**drawing_of(self._generation))
        generator = self._opened()
        turns = [[{"role": "user", "content": text}] for text in asked]
        return [
            reply
            for at in range(0, len(turns), batch_size)
            for reply in generator.replies(turns[at : at + batch_size], sampling)
        ]

    def evaluate(self, dataset: Any, batch_size: int = 1) -> float:
        """Perplexity on the trained tokens of the rows, weighted by tokens. batch_size: sequences that are read at once."""
        from fleetune.training.evaluation import EvaluateOptions, evaluate_model

        rows = rows_of(dataset)
        options = EvaluateOptions(
            sequence_length=int(self._finetuning.max_length) * max(1, batch_size), columns=rows.get("columns", {})
        )
        data = rows["data"]
        return evaluate_model(self.weights, (data,) if isinstance(data, str) else tuple(data), options=options).perplexity

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trained adapter or model with its configs, for `load` and for plain peft or transformers."""
        if self._run is None:
            raise UserError("nothing was trained yet: call finetune first")
        folder, run = Path(path).expanduser(), RunFolder(self._run)
        result = run.adapter if run.adapter.is_dir() else run.model
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: give a new folder")
        shutil.copytree(result, folder, dirs_exist_ok=True)
        configs = {"finetuning_config": self._finetuning.to_dict(), "generation_config": self._generation.to_dict()}
        write_json(folder / _SAVED, {"model_name": self.key, **configs})

    def _opened(self) -> Any:
        if self._generator is None:
            from fleetune.training.evaluation import load_for_reading
            from fleetune.training.generation import Generator
            from fleetune.training.sources import ModelRequest, prepare_source, tokenizer_of

            request = ModelRequest(model=self.weights)
            source = prepare_source(request, device=_device())
            self._generator = Generator(load_for_reading(source, request, device=_device()), tokenizer_of(source, request))
        return self._generator


#: xTuring's name for it.
BaseModel = Model


def create_model(name: str, weights_path: str | os.PathLike[str] | None = None) -> Model:
    """The model of a key."""
    return Model(name, weights_path)


def __getattr__(name: str) -> Any:
    """`GPTOSS20B`, `Llama2LoraInt8`, `GenericLoraModel`: called as xTuring's classes are."""
    key = _key_of(name)
    if key is None:
        near = difflib.get_close_matches(name, CLASSES, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no model {name!r}{hint}")
    return partial(Model, key)


def _key_of(name: str) -> str | None:
    for suffix, ending in sorted(_SUFFIXES.items(), key=lambda entry: -len(entry[0])):
        stem = name.removesuffix(suffix) if suffix else name
        if stem != name or not suffix:
            if stem in CLASSES:
                return CLASSES[stem] + ending
            if suffix and name == f"Generic{suffix}Model":
                return f"generic{ending}"
    generic = {f"Generic{suffix}Model": f"generic{ending}" for suffix, ending in _SUFFIXES.items()}
    return generic.get(name)


def _preset(key: str) -> Preset:
    preset = find_preset(key)
    if preset is None:
        refuse_moved(key)
        near = similar_presets(key)
        raise UserError(f"there is no model {key!r}: {f'did you mean {near[0]}?' if near else 'fleetune presets lists them'}")
    return preset


def _new_folder(parent: Path, key: str) -> str:
    """`<output_dir>/<key>`, with a number where that is there already."""
    number, path = 1, parent / key
    while path.exists():
        number += 1
        path = parent / f"{key}-{number}"
    return str(path)


def _tracker(logger: Any) -> dict[str, bool]:
    if logger is None or logger is False:
        return {}
    name = "TensorBoardLogger" if logger is True else logger if isinstance(logger, str) else type(logger).__name__
    for tracker in ("tensorboard", "wandb", "mlflow"):
        if tracker in name.lower():
            if tracker == "tensorboard" and find_spec("tensorboard") is None:
                raise UserError("logger asks for TensorBoard, which is not installed: pip install 'fleetune[track]'")
            return {tracker: True}
    raise UserError(f"logger {name} is none that is known: give True (TensorBoard), 'wandb' or 'mlflow'")


def _prompts(dataset: Any) -> list[str]:
    from fleetune.bridges.xturing.datasets import InstructionDataset, every_row

    path = rows_of(dataset)["data"]
    columns = getattr(dataset, "columns", {"prompt": "text"})
    prompt = columns["prompt"] if "prompt" in columns else columns["text"]
    with_text = isinstance(dataset, InstructionDataset) and "input" in columns
    texts = []
    for row in every_row(path):
        context = str(row.get(columns["input"]) or "") if with_text else ""
        texts.append(f"{row[prompt]}\n\n{context}" if context.strip() else str(row[prompt]))
    return texts


def _device() -> str:
    from fleetune.launch.devices import count_devices

    return count_devices("auto")[0]
