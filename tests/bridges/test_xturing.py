"""xTuring's Python: models by key and by class, configs of which every key counts, data sets of its shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetune.bridges.xturing import config, models
from fleetune.bridges.xturing.datasets import InstructionDataset, TextDataset, every_row, fields_of
from fleetune.bridges.xturing.models import BaseModel, Model, create_model
from fleetune.spec.declared import declared
from fleetune.spec.errors import UserError

ROWS = {"instruction": ["Add.", "Say {text} as {target}!"], "text": ["1 and 2", "one"], "target": ["3", "1"]}


@pytest.mark.claim(
    "X15",
    command='create_model("llama2"); GPTOSS20B()',
    seen="67 keys, the articles' names, and classes for them",
)
def test_a_class_is_the_model_of_its_key():
    for name, key in (
        ("GPTOSS20B", "gpt_oss_20b"),
        ("GPTOSS120BLoraKbit", "gpt_oss_120b_lora_kbit"),
        ("Llama2LoraInt8", "llama2_lora_int8"),
        ("BloomInt8", "bloom_int8"),
        ("MiniMaxM2", "minimax_m2"),
    ):
        model = getattr(models, name)()
        assert (model.key, model.weights) == (key, key)
    assert models.GenericLoraModel("org/model").weights == "org/model"
    assert BaseModel is Model and BaseModel.create("llama2").key == create_model("llama2").key
    with pytest.raises(AttributeError, match="did you mean GPTOSS20B"):
        models.GPTOS20B  # noqa: B018


@pytest.mark.claim(
    "X19",
    command="from fleetune.bridges.xturing.models import create_model",
    seen="the rest of xTuring's Python",
)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: create_model("lama2"), "did you mean llama2"),
        (lambda: create_model("mistral"), "it is mistral_7b now"),
        (lambda: create_model("generic_lora"), "give weights_path"),
        (lambda: create_model("llama2").save("x"), "call finetune first"),
        (lambda: create_model("llama2").generate(), "texts or a dataset"),
        (lambda: create_model("llama2").finetuning_config().__setattr__("learning_rat", 1), "did you mean learning_rate"),
        (lambda: Model.load("nowhere"), "was not written by save"),
        (lambda: create_model("llama2").finetune("rows.jsonl", logger="paper"), "none that is known"),
        (lambda: InstructionDataset({"instruction": ["a"], "text": ["b"]}), "lack target"),
        (lambda: InstructionDataset(ROWS, infix_instruction=True, promt_template="{instruction}"), "give one of them"),
        (lambda: InstructionDataset(ROWS, promt_template="hello"), "no place for the {instruction}"),
        (lambda: TextDataset({"words": ["a"]}), "lack text"),
        (lambda: TextDataset({"text": []}), "has no row"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(make, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        make()
    assert says in str(refusal.value)


@pytest.mark.claim(
    "X48",
    command="GPTOSS20B()",
    seen="the preset of a large model, as a class",
)
def test_the_configs_hold_the_presets_values_and_each_key_is_a_field():
    model = create_model("gpt_oss_120b")
    tuning = model.finetuning_config()
    assert (tuning.learning_rate, tuning.batch_size, tuning.gradient_accumulation_steps, tuning.max_length) == (
        1e-5,
        1,
        8,
        2048,
    )
    assert (tuning.warmup_steps, tuning.num_train_epochs, tuning.output_dir) == (100, 1, "saved_model")
    assert set(config.FINETUNING.values()) <= set(declared())
    assert config.fields_of(tuning, set()) == {}
    tuning.num_train_epochs, tuning.optimizer_name = 2, "adam"
    assert config.fields_of(tuning, set()) == {"epochs": 2, "optimizer": "adam"}


def test_a_generation_config_says_how_the_next_token_is_chosen():
    contrastive = create_model("gpt_oss_20b").generation_config()
    assert config.drawing_of(contrastive) == {"max_new_tokens": 512, "penalty_alpha": 0.6, "top_k": 4}
    by_chance = create_model("gpt2").generation_config()
    assert config.drawing_of(by_chance) == {"max_new_tokens": 256, "temperature": 1.0, "top_p": 0.92, "top_k": 0}
    greedy = create_model("llama2_int8").generation_config()
    assert config.drawing_of(greedy) == {"max_new_tokens": 256}
    by_chance.penalty_alpha = 0.6
    with pytest.raises(UserError, match="one of them"):
        config.drawing_of(by_chance)


def test_rows_are_read_from_dicts_lists_files_and_folders(tmp_path: Path):
    as_dict = InstructionDataset(ROWS)
    assert as_dict.fields()["columns"] == {"prompt": "instruction", "input": "text", "response": "target"}
    rows = list(every_row(as_dict.path))
    assert [row["target"] for row in rows] == ["3", "1"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert InstructionDataset(str(path)).path == str(path)
    assert InstructionDataset(rows).path == as_dict.path, "the same content is the same file"
    assert InstructionDataset(tmp_path).path == str(tmp_path)
    with_target = TextDataset({"text": ["a"], "target": ["b"]})
    assert with_target.columns == {"prompt": "text", "response": "target"}
    assert fields_of(str(path)) == {"data": str(path)}


def test_instructions_with_places_and_templates_are_written_out():
    infixed = list(every_row(InstructionDataset(ROWS, infix_instruction=True).path))
    assert infixed[1] == {"prompt": "Say one as ", "response": "1!"}
    templated = list(every_row(InstructionDataset(ROWS, promt_template="Do: {instruction} With: {text}").path))
    assert templated[0] == {"prompt": "Do: Add. With: 1 and 2", "response": "3"}
