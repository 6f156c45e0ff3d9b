"""A command line of h2oGPT's `finetune.py` as one of `fleetune train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetune.bridges.h2ogpt.flags import FLAGS, KNOWN
from fleetune.bridges.h2ogpt.prompt_types import find_prompt_type
from fleetune.bridges.h2ogpt.words import read_environment, read_words
from fleetune.data.read import read_rows
from fleetune.data.rows import Row
from fleetune.data.sources import find_files
from fleetune.spec.errors import UserError, raise_if_any

DEFAULT_MODEL = "h2oai/h2ogpt-4096-llama2-7b"
DEFAULT_DATA = "h2oai/openassistant_oasst1_h2ogpt"
#: What counts where nothing else is said: the defaults of the original's signature.
PRESET = "h2ogpt_finetune"


def translate(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The words of `fleetune train`. Flags that are fleetune's own are passed on. Raises UserError with all problems."""
    typed, rest = read_words(words, KNOWN)
    given = {**read_environment(environment, KNOWN), **typed}
    problems: list[str] = []
    out = [f"--preset={PRESET}"]

    def add(action: Callable[[], list[str]]) -> None:
        try:
            out.extend(action())
        except UserError as error:
            problems.extend(error.problems)

    add(lambda: _model(given))
    if "--offline" in rest:
        given["local_files_only"] = True
    add(lambda: _data(given, is_shaped=any(word.startswith("--columns") for word in rest)))
    add(lambda: _precisions_agree(given))
    add(lambda: _resume(given))
    for name, value in given.items():
        if name in FLAGS and not _is_answered(name, given):
            add(lambda name=name, value=value: FLAGS[name](value))  # type: ignore[misc]
    add(lambda: _name_of_run(given, rest))
    raise_if_any(problems)
    return [*out, *rest]


def _is_answered(name: str, given: Mapping[str, Any]) -> bool:
    """Flags of which another says more: --lora beside --lora_r, the run's name, columns of rows that are whole texts."""
    return name == "lora" and given.get("lora_r") is not None and given["lora"] is True


def _precisions_agree(given: Mapping[str, Any]) -> list[str]:
    """fp16 is the original's default, so bf16 alone is bf16; both typed collide; none of them is fp32."""
    if given.get("fp16") is True and given.get("bf16") is True:
        raise UserError("--fp16 and --bf16 name two precisions: give one of them")
    if given.get("train_8bit") is True and given.get("train_4bit") is True:
        raise UserError("--train_8bit and --train_4bit exclude each other: give one of them")
    if given.get("fp16") is False and not given.get("bf16"):
        return ["--precision=fp32"]
    return []


def _model(given: Mapping[str, Any]) -> list[str]:
    base, adapter = given.get("base_model") or DEFAULT_MODEL, given.get("lora_weights")
    if adapter:
        if "base_model" in given:
            from fleetune.models.config import read_json_object

            path = Path(adapter) / "adapter_config.json"
            named = read_json_object(path).get("base_model_name_or_path") if path.is_file() else None
            if named != base:
                raise UserError(
                    f"--lora_weights {adapter} adapts {named!r}, and --base_model is {base!r}: give the one it adapts"
                )
        return [f"--model={adapter}"]
    return [f"--model={base}"]


def _data(given: Mapping[str, Any], *, is_shaped: bool) -> list[str]:
    """The training rows, those mixed in, and those held out."""
    path = given.get("data_path") or DEFAULT_DATA
    offline = given.get("local_files_only") is True
    out = [f"--data={path}"]
    first = _first_row(path, offline)
    if not is_shaped and not given.get("data_col_dict") and first is not None and not first.get("output"):
        # Whole conversations, as `plain` is used for, stand in one column.
        whole = next((name for name in ("input", "instruction") if isinstance(first.get(name), str) and first[name]), None)
        if whole is not None:
            out.append(f"--columns=text={whole}")
    factor = given.get("data_mix_in_factor") or 0
    if factor:
        out += _mixed_in(given, path, float(factor), offline)
    size = given.get("val_set_size")
    if isinstance(size, float) and not size.is_integer():
        raise UserError(f"--val_set_size {size} is a share, and h2oGPT's is a number of rows: give --validation-share {size}")
    if size and not given.get("valid_path"):
        rows = _count_rows(path, offline)
        if size >= rows:
            raise UserError(f"--val_set_size {size} of {rows} rows leaves none to train on: give a smaller one")
        out.append(f"--validation-share={size / rows!r}")
    return out


def _mixed_in(given: Mapping[str, Any], path: str, factor: float, offline: bool) -> list[str]:
    """Rows of a second source, `factor` times as many as of the first."""
    other = given.get("data_mix_in_path")
    if not other:
        raise UserError("--data_mix_in_factor needs rows to mix in: give --data_mix_in_path")
    if given.get("data_mix_in_col_dict"):
        raise UserError("--data_mix_in_col_dict is not done here: one mapping serves all rows; rename the columns of the file")
    kinds = [find_prompt_type(given[name]) for name in ("prompt_type", "data_mix_in_prompt_type") if name in given]
    if len(set(kinds)) > 1:
        raise UserError(f"--data_mix_in_prompt_type {kinds[1]} differs from {kinds[0]}: one template serves all rows of a run")
    weight = factor * _count_rows(path, offline) / max(1, _count_rows(other, offline))
    return [f"--data={other}", f"--data-weights=1,{weight!r}"]


def _first_row(path: str, offline: bool) -> dict[str, Any] | None:
    for file in find_files([path], offline=offline).files:
        for row in read_rows(file):
            if isinstance(row, Row):
                return dict(row.fields)
    return None


def _count_rows(path: str, offline: bool) -> int:
    return sum(1 for file in find_files([path], offline=offline).files for _ in read_rows(file))


def _resume(given: Mapping[str, Any]) -> list[str]:
    """A run folder, or a checkpoint inside of one."""
    path = given.get("resume_from_checkpoint")
    if not path or path is True:
        return ["--resume"] if path else []
    folder = next((place for place in (Path(path), *Path(path).parents) if (place / "run.yaml").is_file()), None)
    if folder is None:
        raise UserError(f"--resume_from_checkpoint {path} lies in no run folder: give the folder of a run (it holds run.yaml)")
    return [f"--run={folder}", "--resume"]


def _name_of_run(given: Mapping[str, Any], rest: Sequence[str]) -> list[str]:
    """With a run_id, the folder's name is made as in the original: model, data, epochs and the id."""
    if given.get("run_id") is None or given.get("output_dir") or any(word.startswith("--run") for word in rest):
        return []
    base = str(given.get("base_model") or DEFAULT_MODEL).rpartition("/")[2]
    data = Path(str(given.get("data_path") or DEFAULT_DATA)).stem
    return [f"--run=runs/{base}.{data}.{given.get('num_epochs', 1)}_epochs.{given['run_id']}"]
