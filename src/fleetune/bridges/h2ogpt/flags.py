"""Every flag of h2oGPT's `finetune.py` and of the article about it: what it is here, or why it is not.

A translation takes the value and gives words of `fleetune train`; it raises UserError for a value that cannot be met.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetune.bridges.h2ogpt.prompt_types import find_prompt_type, template_of
from fleetune.spec.errors import UserError

Translation = Callable[[Any], list[str]]


def _value(flag: str) -> Translation:
    """The same value under another name; None is what was not given."""
    return lambda value: [] if value is None else [f"{flag}={value}"]


def _switch(flag: str) -> Translation:
    return lambda value: [flag if _is_on(value) else f"--no-{flag[2:]}"]


def _chosen(on: list[str], off: list[str]) -> Translation:
    return lambda value: on if _is_on(value) else off


def _refused(name: str, allowed: tuple[Any, ...], why: str) -> Translation:
    """Only the values of the original that change nothing are taken."""

    def check(value: Any) -> list[str]:
        if value in allowed:
            return []
        raise UserError(f"--{name} {value!r} of h2oGPT is not done here: {why}")

    return check


def _is_on(value: Any) -> bool:
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise UserError(f"{value!r} is neither True nor False: write the flag alone, or =False")


def _columns(value: Any) -> list[str]:
    """{'A': 'input', 'B': 'output'}: which column plays which role."""
    roles = {"instruction": "prompt", "input": "input", "output": "response"}
    if value is None:
        return []
    if not isinstance(value, dict) or not all(role in roles for role in value.values()):
        raise UserError(
            f"--data_col_dict {value!r} must give columns the roles instruction, input and output: as {{'A':'input'}}"
        )
    named = {roles[role]: column for column, role in value.items()}
    if "prompt" not in named and "input" in named:
        named["prompt"] = named.pop("input")
    return ["--columns=" + ",".join(f"{role}={column}" for role, column in named.items())]


def _prompt_type(value: Any) -> list[str]:
    template = template_of(find_prompt_type(value))
    return [] if template is None else [f"--chat-template={template}"]


def _metrics(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else list(value or ())
    reasons = {"meteor": "it needs a word list that is downloaded while it runs", "bleu": "", "rouge": "", "sacrebleu": ""}
    for name in names:
        if name not in reasons:
            raise UserError(f"--val_metrics {name!r} is none of h2oGPT's metrics: give --exact-match instead")
        why = reasons[name] or "overlap of words says little of an answer"
        raise UserError(f"--val_metrics {name} is not computed here ({why}): give --exact-match, which counts right answers")
    return []


def _rank(value: Any) -> list[str]:
    return ["--method=full"] if value == 0 else ["--method=lora", f"--lora-rank={value}"]


def _targets(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else list(value or ())
    return [f"--lora-targets={','.join(names)}"] if names else []


def _precision(name: str) -> Translation:
    return lambda value: [f"--precision={name}"] if _is_on(value) else []


_OWN = "fleetune finds it by looking at the model"
#: Flag -> translation. What is in neither the table nor fleetune itself is told as unknown.
FLAGS: dict[str, Translation] = {
    # the article's
    "lora": _chosen(["--method=lora"], ["--method=full"]),
    "gradient_checkpointing": _switch("--gradient-checkpointing"),
    "fp16": _precision("fp16"),
    "bf16": _precision("bf16"),
    # h2oGPT's own
    "save_code": _refused("save_code", (False,), "run.yaml holds every setting with where it came from; leave it out"),
    "run_id": lambda value: [],
    "tokenizer_base_model": _refused("tokenizer_base_model", (None, ""), "the tokenizer comes with the model; put it there"),
    "data_col_dict": _columns,
    "prompt_type": _prompt_type,
    "valid_path": _value("--validation"),
    "output_dir": _value("--run"),
    "batch_size": _value("--global-batch-size"),
    "micro_batch_size": _value("--micro-batch-size"),
    "train_8bit": _chosen(["--quantize=int8"], []),
    "train_4bit": _chosen(["--quantize=nf4"], []),
    "num_epochs": _value("--epochs"),
    "val_metrics": _metrics,
    "eval_steps": _value("--evaluate-every"),
    "eval_epochs": _refused("eval_epochs", (None,), "give --eval_steps, the same in optimizer steps"),
    "lora_r": _rank,
    "lora_alpha": _value("--lora-alpha"),
    "lora_dropout": _value("--lora-dropout"),
    "lora_target_modules": _targets,
    "llama_type": _refused("llama_type", (None, True, False), f"{_OWN}; leave it out"),
    "llama_flash_attn": _refused("llama_flash_attn", (False,), "the fastest exact attention is taken by itself; leave it out"),
    "train_on_inputs": _chosen(["--train-on=all"], ["--train-on=assistant"]),
    "group_by_length": _refused("group_by_length", (False,), "give --packing, which leaves no padding at all"),
    "cutoff_len": _value("--sequence-length"),
    "drop_truncations": _chosen(["--over-long=drop"], ["--over-long=cut"]),
    "ddp": _refused("ddp", (True,), "to spread one model over GPUs, give --shard or --pipeline with their number"),
    "local_files_only": _switch("--offline"),
    "resume_download": _refused("resume_download", (True,), "a download that broke off is always gone on with; leave it out"),
    "use_auth_token": _refused(
        "use_auth_token", (False, True, None), "a secret on a command line is seen by all: set HF_TOKEN"
    ),
    "logging_steps": _value("--log-every"),
    "save_steps": _value("--checkpoint-every"),
    "save_total_limit": _value("--keep-checkpoints"),
    "add_eos_token": _refused("add_eos_token", (True,), "every text ends with it, or a model never learns to stop"),
}
#: Flags that are worked out together with others, in `translate`.
TOGETHER = (
    "base_model",
    "lora_weights",
    "data_path",
    "data_mix_in_path",
    "data_mix_in_factor",
    "data_mix_in_col_dict",
    "data_mix_in_prompt_type",
    "val_set_size",
    "resume_from_checkpoint",
)
KNOWN = (*FLAGS, *TOGETHER)
