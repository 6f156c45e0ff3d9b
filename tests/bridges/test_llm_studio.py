"""H2O LLM Studio: its tables with parent chains and its config are read; a run's config is written as it reads one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetune.bridges.llm_studio.__main__ import main
from fleetune.bridges.llm_studio.chains import Columns, conversations
from fleetune.bridges.llm_studio.config import read_config, template_of, write_config
from fleetune.data.chat_format import ChatFormat
from fleetune.data.conversations import Conversation
from fleetune.spec.declared import declared
from fleetune.spec.errors import UserError
from fleetune.spec.given import Source
from fleetune.spec.read import resolve
from fleetune.spec.yaml_file import dump, parse

TREE = """id,parent_id,instruction,output,system
1,,Hi,Hello,Be brief.
2,1,And?,Well.,
3,1,Or?,Maybe.,
4,3,So?,Yes.,
9,,Alone,Yes,
"""
CHAINED = Columns(system="system", parent="parent_id")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "train.csv"
    path.write_text(TREE)
    return path


def config_of(table: Path, **sections):
    base = {
        "experiment_name": "first",
        "llm_backbone": "h2oai/h2o-danube-1.8b-chat",
        "problem_type": "text_causal_language_modeling",
        "architecture": {"backbone_dtype": "int4", "gradient_checkpointing": True, "intermediate_dropout": 0.0},
        "dataset": {
            "train_dataframe": str(table), "validation_dataframe": "None", "validation_size": 0.1,
            "prompt_column": ["instruction"],
            "answer_column": "output", "system_column": "system", "parent_id_column": "parent_id", "id_column": "id",
            "limit_chained_samples": True, "mask_prompt_labels": True, "only_last_answer": False,
            "text_prompt_start": "<|prompt|>",
            "text_answer_separator": "<|answer|>", "text_system_start": "<|system|>", "add_eos_token_to_answer": True,
            "add_eos_token_to_prompt": True, "add_eos_token_to_system": True,
        },
        "environment": {"gpus": ["0", "1"], "mixed_precision": True, "mixed_precision_dtype": "bfloat16", "seed": -1,
                        "use_deepspeed": False, "huggingface_branch": "main", "number_of_workers": 4},
        "tokenizer": {"max_length": 512},
        "training": {"batch_size": 2, "grad_accumulation": 4, "epochs": 2, "learning_rate": 1e-4, "lora": True, "lora_r": 4,
                     "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_modules": "", "optimizer": "AdamW",
                     "schedule": "Cosine",
                     "warmup_epochs": 0.1, "weight_decay": 0.0, "gradient_clip": 0.0, "use_dora": False,
                     "loss_function": "TokenAveragedCrossEntropy"},
    }  # fmt: skip
    for section, values in sections.items():
        base[section] = {**base[section], **values} if isinstance(values, dict) else values
    return base


def test_a_config_is_said_in_the_fields_of_a_run(table):
    fields = read_config(config_of(table))
    wanted = {"model": "h2oai/h2o-danube-1.8b-chat", "method": "lora", "quantize": "nf4", "precision": "bf16", "gpus": 2,
              "micro_batch_size": 2, "gradient_accumulation_steps": 4, "epochs": 2, "learning_rate": 1e-4, "lora_rank": 4,
              "lora_alpha": 16, "lora_dropout": 0.05, "schedule": "cosine", "warmup": 0.05, "sequence_length": 512,
              "validation_share": 0.1, "train_on": "assistant", "num_workers": 4, "adapter": "lora", "gradient_clip": 0.0,
              "gradient_checkpointing": True}  # fmt: skip
    assert {name: fields[name] for name in wanted} == wanted
    known = {name: value for name, value in fields.items() if name in declared()}
    assert set(fields) - set(known) <= {"quantize"}
    resolve(flags=Source("argument", known))
    full = read_config(config_of(table, training={"lora": False}, architecture={"backbone_dtype": "float16"}))
    assert full["method"] == "full" and "lora_rank" not in full and "quantize" not in full


def test_chains_become_conversations(table):
    rows = [json.loads(line) for line in Path(read_config(config_of(table))["data"]).read_text().splitlines()]
    said = [[message["content"] for message in row["messages"]] for row in rows]
    assert said == [
        ["Be brief.", "Hi", "Hello", "And?", "Well."],
        ["Be brief.", "Hi", "Hello", "Or?", "Maybe.", "So?", "Yes."],
        ["Alone", "Yes"],
    ]
    every = read_config(config_of(table, dataset={"limit_chained_samples": False}))
    assert len(Path(every["data"]).read_text().splitlines()) == 5


def test_ids_that_a_table_of_numbers_gives_as_fractions_are_found():
    rows = [
        {"id": 1, "parent_id": None, "instruction": "a", "output": "b"},
        {"id": 2, "parent_id": 1.0, "instruction": "c", "output": "d"},
    ]
    (row,) = conversations(rows, Columns(parent="parent_id"), only_whole=True)
    assert len(row["messages"]) == 4


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"id": 1, "parent_id": 5}], "names the parent '5'"),
        ([{"id": 1, "parent_id": 2}, {"id": 2, "parent_id": 1}], "its own ancestor"),
        ([{"id": 1, "parent_id": ""}, {"id": 1, "parent_id": ""}], "names a row twice"),
    ],
)
def test_chains_that_lead_nowhere_are_refused(rows, says):
    whole = [{"instruction": "a", "output": "b", **row} for row in rows]
    with pytest.raises(UserError, match=says):
        list(conversations(whole, Columns(parent="parent_id"), only_whole=False))


def test_turns_are_written_as_llm_studio_does():
    template = template_of(lambda key: {"dataset.add_eos_token_to_prompt": False}.get(key))
    messages = ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"})
    (part,) = ChatFormat(template, {"eos_token": "</s>"}).parts(Conversation(messages))
    assert part.text == "<|system|>S</s><|prompt|>Q<|answer|>A</s>"
    assert [part.text[a:b] for a, b in part.answers] == ["A</s>"]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"problem_type": "text_rlhf"}, "only causal language models"),
        ({"augmentation": "x", "training": {"loss_function": "CrossEntropy"}}, "training.loss_function 'CrossEntropy'"),
        ({"llm_backbone": ""}, "llm_backbone names no model"),
        ({"dataset": {"only_last_answer": True}}, "every answer of a conversation is trained"),
        ({"training": {"schedule": "Polynomial"}}, "'polynomial'"),
        ({"dataset": {"answer_column": "reply"}}, "lacks reply"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(sections, says, table):
    with pytest.raises(UserError) as refusal:
        read_config(config_of(table, **sections))
    assert says in str(refusal.value)


@pytest.mark.claim(
    "H41",
    command="python -m fleetune.bridges.llm_studio cfg.yaml; ... --write RUN cfg.yaml",
    seen="its config and its csv with parent chains are read; the config that is written for a run is read back as that run",
)
def test_the_config_of_a_run_is_read_back_as_that_run(table):
    asked = {"model": "org/model", "data": str(table), "method": "lora", "lora_rank": 4, "epochs": 2, "warmup": 0.05,
             "learning_rate": 1e-4, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "gpus": 2, "precision": "bf16",
             "sequence_length": 512, "validation_share": 0.1, "seed": 7, "lora_targets": "q_proj,v_proj", "adapter": "dora",
             "columns": {"prompt": "instruction", "response": "output"}}  # fmt: skip
    spec = resolve(flags=Source("argument", asked)).spec
    written = parse(dump(write_config(spec.flat(), name="first")), "cfg.yaml").values
    fields = read_config(written)
    for name in set(asked) - {"data", "columns"}:
        assert fields[name] == asked[name], name
    rows = [json.loads(line) for line in Path(fields["data"]).read_text().splitlines()]
    assert [message["content"] for message in rows[0]["messages"]] == ["Hi", "Hello"]


#: Fields of LLM Studio's config classes (h2oai/h2o-llmstudio, python_configs/text_causal_language_modeling_config.py). Its
#: reader gives what is absent its default and passes over what it does not know: only what it knows may be written.
THEIRS = {
    "": "experiment_name llm_backbone problem_type dataset training tokenizer architecture augmentation prediction environment",
    "dataset": "train_dataframe validation_strategy validation_dataframe validation_size data_sample system_column "
    "prompt_column answer_column parent_id_column text_system_start text_prompt_start text_answer_separator "
    "add_eos_token_to_system add_eos_token_to_prompt add_eos_token_to_answer limit_chained_samples mask_prompt_labels "
    "only_last_answer",
    "training": "loss_function optimizer learning_rate batch_size epochs schedule min_learning_rate_ratio warmup_epochs "
    "weight_decay gradient_clip grad_accumulation lora use_dora use_rslora lora_r lora_alpha lora_dropout lora_target_modules",
    "tokenizer": "max_length padding_quantile",
    "architecture": "backbone_dtype gradient_checkpointing intermediate_dropout",
    "prediction": "metric max_length_inference",
    "environment": "gpus mixed_precision mixed_precision_dtype use_deepspeed deepspeed_method huggingface_branch "
    "number_of_workers seed",
}


@pytest.mark.claim(
    "H41",
    command="python -m fleetune.bridges.llm_studio --write RUN cfg.yaml",
    seen="every key that is written is a field of LLM Studio's config, also held-out tables and DeepSpeed",
)
def test_only_fields_of_llm_studio_are_written_and_its_switches_are_set(table):
    asked = {"model": "org/model", "data": str(table), "validation": str(table), "zero_stage": 3, "use_deepspeed": True,
             "quantize": "int8", "method": "lora", "schedule": "linear"}  # fmt: skip
    written = write_config(resolve(flags=Source("argument", asked)).spec.flat(), name="first")
    for section, names in THEIRS.items():
        assert set(written if not section else written.get(section, {})) <= set(names.split()), section
    assert (written["dataset"]["validation_strategy"], written["dataset"]["validation_dataframe"]) == ("custom", str(table))
    assert (written["environment"]["use_deepspeed"], written["environment"]["deepspeed_method"]) == (True, "ZeRO3")
    assert written["architecture"]["backbone_dtype"] == "int8" and written["training"]["schedule"] == "Linear"
    again = read_config(written)
    assert again["validation"] and (again["use_deepspeed"], again["zero_stage"]) == (True, 3)
    written["dataset"]["validation_strategy"] = "automatic"
    assert "validation" not in read_config(written), "LLM Studio does not look at the table then"
    alone = write_config(resolve(flags=Source("argument", {"model": "org/model", "data": str(table)})).spec.flat(), name="x")
    assert alone["dataset"]["validation_size"] == 0.01 and alone["environment"]["use_deepspeed"] is False


def test_the_command_says_what_is_wrong_and_how_it_is_used(capsys, tmp_path):
    assert main([]) == 2 and "usage" in capsys.readouterr().err
    assert main([str(tmp_path / "none.yaml")]) == 2 and "does not exist" in capsys.readouterr().err
    assert main(["--write", str(tmp_path)]) == 2
