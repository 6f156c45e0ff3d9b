"""LLM Studio's experiment config, said as fields of a run, and written from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fleetune.bridges.given_rows import write_rows, write_text
from fleetune.bridges.llm_studio.chains import Columns, conversations
from fleetune.data.read import read_rows
from fleetune.data.rows import Row
from fleetune.data.sources import find_files
from fleetune.spec.errors import UserError, raise_if_any

PROBLEM = "text_causal_language_modeling"
_NOTHING = (None, "", "None")
#: section.key -> field of a run, where the value is the same.
SAME = {
    "training.learning_rate": "learning_rate",
    "training.batch_size": "micro_batch_size",
    "training.grad_accumulation": "gradient_accumulation_steps",
    "training.epochs": "epochs",
    "training.lora_r": "lora_rank",
    "training.lora_alpha": "lora_alpha",
    "training.lora_dropout": "lora_dropout",
    "training.gradient_clip": "gradient_clip",
    "training.weight_decay": "weight_decay",
    "training.min_learning_rate_ratio": "final_learning_rate_share",
    "tokenizer.max_length": "sequence_length",
    "architecture.gradient_checkpointing": "gradient_checkpointing",
    "prediction.max_length_inference": "max_new_tokens",
    "environment.number_of_workers": "num_workers",
}
_OF_LORA = {"lora_rank", "lora_alpha", "lora_dropout"}
#: Keys whose other values would change the training and are not done here: key -> (values that are, why).
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "problem_type": ((PROBLEM,), "only causal language models are trained"),
    "training.optimizer": (("AdamW", "Adam"), "give AdamW or Adam"),
    "training.loss_function": (("TokenAveragedCrossEntropy",), "the loss is a mean over trained tokens"),
    "training.differential_learning_rate_layers": (([], _NOTHING[1], None), "all layers have one rate"),
    "training.freeze_layers": (([], None, ""), "an adapter freezes the rest; full training freezes nothing"),
    "training.lora_unfreeze_layers": (([], None, ""), "only the adapter is trained"),
    "training.train_validation_data": ((False,), "held-out rows are not trained on"),
    "augmentation.neftune_noise_alpha": ((0, 0.0, None), "no noise is added"),
    "augmentation.token_mask_probability": ((0, 0.0, None), "no token is masked"),
    "augmentation.skip_parent_probability": ((0, 0.0, None), "no turn is left out"),
    "augmentation.random_parent_probability": ((0, 0.0, None), "no turn is put in"),
    "dataset.only_last_answer": ((False, None), "every answer of a conversation is trained"),
    "dataset.data_sample": ((1, 1.0, None), "all rows are read"),
    "dataset.personalize": ((False, None), "rows are not rewritten"),
    "architecture.intermediate_dropout": ((0, 0.0, None), "give lora_dropout"),
}


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run. Raises UserError with everything that cannot be done here."""
    get = _getter(config)
    problems = [
        f"{key} {get(key)!r} is not done here ({why}): set it to {allowed[0]!r}"
        for key, (allowed, why) in ONLY.items()
        if get(key) is not None and get(key) not in allowed
    ]
    backbone = get("llm_backbone")
    if backbone in _NOTHING:
        problems.append("llm_backbone names no model: give a hub id or a folder")
    if get("dataset.train_dataframe") in _NOTHING:
        problems.append("dataset.train_dataframe names no table: give a csv or parquet file")
    raise_if_any(problems)
    fields = {field: get(key) for key, field in SAME.items() if get(key) is not None}
    fields |= {"model": str(backbone), "method": "lora" if get("training.lora") else "full"}
    if fields["method"] == "full":
        fields = {name: value for name, value in fields.items() if name not in _OF_LORA}
    fields |= _training(get) | _devices(get) | _rows(get)
    return {name: value for name, value in fields.items() if value is not None}


def _training(get: Callable[[str], Any]) -> dict[str, Any]:
    epochs, warmup = get("training.epochs") or 1, get("training.warmup_epochs") or 0
    schedule = str(get("training.schedule") or "Cosine").lower()
    if schedule not in ("cosine", "linear", "constant"):
        raise UserError(f"training.schedule {schedule!r} is not done here: give Cosine, Linear or Constant")
    fields: dict[str, Any] = {
        "schedule": schedule,
        "warmup": min(0.99, warmup / epochs),
        "optimizer": str(get("training.optimizer") or "AdamW").lower(),
    }
    if schedule == "constant":
        fields["final_learning_rate_share"] = None
    if get("training.lora"):
        targets = get("training.lora_target_modules")
        fields["lora_targets"] = targets if targets not in _NOTHING else None
        fields["adapter"] = "dora" if get("training.use_dora") else "rslora" if get("training.use_rslora") else "lora"
    return fields


def _devices(get: Callable[[str], Any]) -> dict[str, Any]:
    """Precision, quantised base, seed, number of processes, DeepSpeed."""
    dtype = str(get("architecture.backbone_dtype") or "")
    precision = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    mixed = str(get("environment.mixed_precision_dtype") or "") if get("environment.mixed_precision") else dtype
    gpus = get("environment.gpus")
    seed = get("environment.seed")
    deepspeed = {"use_deepspeed": True, "zero_stage": 3 if get("environment.deepspeed_method") == "ZeRO3" else 2}
    return {
        "quantize": {"int8": "int8", "int4": "nf4"}.get(dtype),
        "precision": precision.get(mixed),
        "gpus": len(gpus) if isinstance(gpus, list) and gpus else None,
        "seed": seed if isinstance(seed, int) and seed >= 0 else None,
        "revision": None
        if get("environment.huggingface_branch") in (*_NOTHING, "main")
        else get("environment.huggingface_branch"),
        **(deepspeed if get("environment.use_deepspeed") else {}),
    }


def _rows(get: Callable[[str], Any]) -> dict[str, Any]:
    """The tables as conversations, and the texts around their turns as a chat template."""
    given = get("dataset.prompt_column")
    columns = Columns(
        prompt=tuple(given) if isinstance(given, (list, tuple)) else (str(given or "instruction"),),
        answer=str(get("dataset.answer_column") or "output"),
        system=_or_none(get("dataset.system_column")),
        parent=_or_none(get("dataset.parent_id_column")),
        id=str(_or_none(get("dataset.id_column")) or "id"),
    )
    only_whole = bool(get("dataset.limit_chained_samples"))
    fields: dict[str, Any] = {"data": _table(str(get("dataset.train_dataframe")), columns, only_whole)}
    held_out = _or_none(get("dataset.validation_dataframe"))
    if held_out is not None and get("dataset.validation_strategy") != "automatic":
        fields["validation"] = _table(held_out, columns, only_whole)
    elif get("dataset.validation_size"):
        fields["validation_share"] = get("dataset.validation_size")
    fields["train_on"] = "all" if get("dataset.mask_prompt_labels") is False else "assistant"
    fields["chat_template"] = write_text(template_of(get), ".jinja")
    return fields


def _table(path: str, columns: Columns, only_whole: bool) -> str:
    rows = (row.fields for file in find_files([path], offline=True).files for row in read_rows(file) if isinstance(row, Row))
    return write_rows(conversations(rows, columns, only_whole=only_whole))


def template_of(get: Callable[[str], Any]) -> str:
    """A chat template that writes turns as LLM Studio does: a start, the text, and an end of text where it is asked for."""

    def text(key: str, default: str) -> str:
        value = get(key)
        return repr(str(default if value is None else value))

    def end(key: str) -> str:
        return " + eos_token" if get(key) is not False else ""

    system = f"{text('dataset.text_system_start', '<|system|>')} + message['content']{end('dataset.add_eos_token_to_system')}"
    prompt = f"{text('dataset.text_prompt_start', '<|prompt|>')} + message['content']{end('dataset.add_eos_token_to_prompt')}"
    start = text("dataset.text_answer_separator", "<|answer|>")
    answer = f"{start} + message['content']{end('dataset.add_eos_token_to_answer')}"
    return (
        "{%- for message in messages -%}{%- if message['role'] == 'system' -%}{{ " + system + " }}"
        "{%- elif message['role'] == 'assistant' -%}{{ " + answer + " }}"
        "{%- else -%}{{ " + prompt + " }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ " + start + " }}{%- endif -%}"
    )


def write_config(values: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """The config of a run as LLM Studio reads it. values: the run's fields, flat. Its tables must be csv or parquet."""
    document: dict[str, Any] = {"experiment_name": name, "llm_backbone": values["model"], "problem_type": PROBLEM}
    for key, field in SAME.items():
        section, _, short = key.partition(".")
        if values.get(field) is not None:
            document.setdefault(section, {})[short] = values[field]
    columns, warmup = dict(values.get("columns") or {}), float(values["warmup"]) * float(values["epochs"])
    document["training"] |= {
        "lora": values["method"] != "full",
        "lora_target_modules": ",".join(values["lora_targets"]),
        "use_dora": values["adapter"] == "dora",
        "use_rslora": values["adapter"] == "rslora",
        "schedule": str(values["schedule"]).capitalize(),
        "warmup_epochs": warmup,
        "optimizer": "Adam" if values["optimizer"] == "adam" else "AdamW",
        "loss_function": "TokenAveragedCrossEntropy",
        "learning_rate": values["learning_rate"] or (2e-5 if values["method"] == "full" else 2e-4),
    }
    document["dataset"] = {
        "train_dataframe": values["data"][0] if values["data"] else "",
        "validation_strategy": "custom" if values["validation"] else "automatic",
        "validation_dataframe": values["validation"][0] if values["validation"] else "",
        "validation_size": values["validation_share"] or 0.01,  # LLM Studio always holds some out
        "prompt_column": [columns.get("prompt", "instruction")],
        "answer_column": columns.get("response", "output"),
        "system_column": columns.get("system", "None"),
        "parent_id_column": "None",
        "mask_prompt_labels": values["train_on"] == "assistant",
    }
    is_deepspeed = values["use_deepspeed"] or values["engine"] == "deepspeed" or bool(values["deepspeed"])
    dtypes = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "auto": "bfloat16"}
    quantized = {"int8": "int8", "nf4": "int4"}.get(str(values.get("quantize")), dtypes[str(values["precision"])])
    document["architecture"] |= {"backbone_dtype": quantized}
    document["environment"] = {
        **document.get("environment", {}),
        "gpus": [str(number) for number in range(values["gpus"] or 1)],
        "seed": values["seed"],
        "mixed_precision": values["precision"] in ("fp16", "bf16"),
        "mixed_precision_dtype": dtypes[str(values["precision"])],
        "huggingface_branch": values["revision"] or "main",
        "use_deepspeed": is_deepspeed,
        "deepspeed_method": "ZeRO3" if values["zero_stage"] == 3 else "ZeRO2",
    }
    return document


def _getter(config: Mapping[str, Any]) -> Callable[[str], Any]:
    def get(key: str) -> Any:
        section, _, short = key.partition(".")
        value = config.get(section)
        return value if not short else value.get(short) if isinstance(value, Mapping) else None

    return get


def _or_none(value: Any) -> str | None:
    return None if value in _NOTHING else str(value)
