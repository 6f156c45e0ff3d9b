"""h2oGPT's command line: every flag is translated, or refused by name with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetune.bridges.h2ogpt.flags import KNOWN
from fleetune.bridges.h2ogpt.prompt_types import OWN, WRITTEN, find_prompt_type, template_of
from fleetune.bridges.h2ogpt.translate import translate
from fleetune.bridges.h2ogpt.words import read_words
from fleetune.data.chat_format import ChatFormat
from fleetune.data.conversations import Conversation
from fleetune.models.presets import find_preset
from fleetune.spec.errors import UserError

CONSTANTS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"instruction": f"Say {n}.", "input": "", "output": str(n)} for n in range(8)]))
    return str(path)


def translated(rows: str, *words: str, **environment: str) -> list[str]:
    found = translate([f"--data_path={rows}", "--base_model=org/model", *words], environment)
    assert found[:3] == ["--preset=h2ogpt_finetune", "--model=org/model", f"--data={rows}"]
    return found[3:]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--lora"], ["--method=lora"]),
        (["--lora", "--lora_r=16"], ["--method=lora", "--lora-rank=16"]),
        (["--lora_r=0"], ["--method=full"]),
        (["--gradient_checkpointing"], ["--gradient-checkpointing"]),
        (["--gradient_checkpointing=False"], ["--no-gradient-checkpointing"]),
        (["--fp16"], ["--precision=fp16"]),
        (["--bf16", "True"], ["--precision=bf16"]),
        (["--fp16=False"], ["--precision=fp32"]),
        (["--nofp16", "--bf16"], ["--precision=bf16"]),
        (["--batch_size=128", "--micro_batch_size=4"], ["--global-batch-size=128", "--micro-batch-size=4"]),
        (["--num_epochs=0.5", "--cutoff_len=256"], ["--epochs=0.5", "--sequence-length=256"]),
        (["--train_8bit"], ["--quantize=int8"]),
        (["--train_4bit=True"], ["--quantize=nf4"]),
        (["--train_on_inputs=False"], ["--train-on=assistant"]),
        (["--drop_truncations"], ["--over-long=drop"]),
        (["--lora_target_modules=['q_proj', 'v_proj']"], ["--lora-targets=q_proj,v_proj"]),
        (["--eval_steps=5", "--save_steps=10", "--save_total_limit=2", "--logging_steps=3"],
         ["--evaluate-every=5", "--checkpoint-every=10", "--keep-checkpoints=2", "--log-every=3"]),
        (["--local_files_only"], ["--offline"]),
        (["--valid_path=v.json"], ["--validation=v.json"]),
        (["--val_set_size=2"], ["--validation-share=0.25"]),
        (["--output_dir=out"], ["--run=out"]),
        (["--run_id=7", "--num_epochs=2"], ["--epochs=2", "--run=runs/model.rows.2_epochs.7"]),
        (["--prompt_type=llama2"], []),
        (["--num_nodes=4", "--learning_rate", "2e-5", "--tensorboard", "--log_level=info", "--use_deepspeed"],
         ["--num_nodes=4", "--learning_rate", "2e-5", "--tensorboard", "--log_level=info", "--use_deepspeed"]),
        (["--data_col_dict={'A':'input','B':'output'}"], ["--columns=response=B,prompt=A"]),
    ],
)  # fmt: skip
def test_a_flag_is_said_in_the_words_of_fleetune(words, wanted, rows):
    assert translated(rows, *words) == wanted


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--val_metrics=['meteor']"], "--val_metrics meteor is not computed here (it needs a word list that is downloaded"),
        (["--prompt_type=custom"], "cannot be trained with (it is given in code"),
        (["--prompt_type=human_bott"], "did you mean human_bot?"),
        (["--prompt_type=-1"], "prompt_type -1 cannot be trained with"),
        (["--fp16", "--bf16"], "name two precisions"),
        (["--train_8bit", "--train_4bit"], "exclude each other"),
        (["--ddp=False"], "give --shard or --pipeline"),
        (["--group_by_length"], "--packing"),
        (["--save_code"], "run.yaml holds every setting"),
        (["--use_auth_token=hf_abc"], "set HF_TOKEN"),
        (["--eval_epochs=1"], "give --eval_steps"),
        (["--val_set_size=0.1"], "give --validation-share 0.1"),
        (["--val_set_size=8"], "leaves none to train on"),
        (["--data_mix_in_factor=1"], "give --data_mix_in_path"),
        (["--resume_from_checkpoint=nowhere"], "lies in no run folder"),
        (["--gradient_checkpointing=2"], "neither True nor False"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_with_the_reason(words, says, rows):
    with pytest.raises(UserError) as refusal:
        translated(rows, *words)
    assert says in str(refusal.value)


def test_the_environment_gives_what_the_command_line_does_not(rows):
    assert translated(rows, H2OGPT_LORA_R="4") == ["--method=lora", "--lora-rank=4"]
    assert translated(rows, "--lora_r=2", H2OGPT_LORA_R="4", H2OGPT_FP16="") == ["--method=lora", "--lora-rank=2"]


def test_mixed_in_rows_are_factor_times_the_others(rows, tmp_path):
    other = tmp_path / "more.jsonl"
    other.write_text('{"instruction": "a", "output": "b"}\n' * 4)
    found = translated(rows, f"--data_mix_in_path={other}", "--data_mix_in_factor=0.5")
    assert found == [f"--data={other}", "--data-weights=1,1.0"]


def test_whole_conversations_in_one_column_are_read_as_text(tmp_path):
    path = tmp_path / "oasst.json"
    path.write_text(json.dumps([{"input": "<human>: hello\n<bot>: hi\n<human>:", "prompt_type": "plain", "source": "s"}]))
    assert "--columns=text=input" in translate([f"--data_path={path}", "--base_model=o/m"], {})


def test_every_parameter_of_the_original_is_known():
    original = (
        "save_code run_id base_model tokenizer_base_model data_path data_col_dict prompt_type valid_path data_mix_in_path "
        "data_mix_in_factor data_mix_in_col_dict data_mix_in_prompt_type output_dir lora_weights batch_size micro_batch_size "
        "gradient_checkpointing bf16 fp16 train_8bit train_4bit num_epochs learning_rate val_set_size val_metrics eval_steps "
        "eval_epochs lora_r lora_alpha lora_dropout lora_target_modules llama_type llama_flash_attn train_on_inputs "
        "group_by_length resume_from_checkpoint cutoff_len drop_truncations ddp local_files_only resume_download "
        "use_auth_token warmup_steps logging_steps save_steps save_total_limit add_eos_token"
    )
    passed_on = {"learning_rate", "warmup_steps"}
    assert set(original.split()) - set(KNOWN) == passed_on


def test_words_are_read_as_fire_reads_them():
    known = ["a", "b", "c"]
    assert read_words(["--a", "--b=1e-5", "--noc", "--x", "5", "y"], known) == (
        {"a": True, "b": 1e-5, "c": False},
        ["--x", "5", "y"],
    )
    assert read_words(["--a", "[1, 'z']", "--a=None"], known)[0] == {"a": None}


def parts_of(name: str) -> list[tuple[str, list[str]]]:
    template = template_of(name)
    assert template is not None
    messages = (
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Still."},
    )
    format = ChatFormat(Path(template).read_text(), CONSTANTS)
    return [(part.text, [part.text[a:b] for a, b in part.answers]) for part in format.parts(Conversation(messages))]


def test_human_bot_ends_with_the_next_human_so_that_a_model_learns_to_stop():
    assert parts_of("human_bot") == [
        (
            "<human>: How are you?\n<bot>: Well.\n<human>: And now?\n<bot>: Still.\n<human>:",
            ["Well.\n<human>:", "Still.\n<human>:"],
        )
    ]


@pytest.mark.parametrize("name", ["instruct", "simple_instruct", "plain"])
def test_a_prompt_type_trains_the_answers_alone(name):
    ((text, answers),) = parts_of(name)
    assert [answer.strip() for answer in answers] == ["Well.", "Still."]
    assert text.index("How are you?") < text.index("Well.") < text.index("And now?")


def test_prompt_types_are_found_by_number_too():
    for name, number in {**WRITTEN, **OWN}.items():
        assert find_prompt_type(name) == name
        assert number is None or find_prompt_type(number) == name


def test_the_defaults_of_the_original_count_where_nothing_is_said():
    preset = find_preset("h2ogpt_finetune")
    assert preset is not None and preset.hub is None
    wanted = {"learning_rate": 3e-4, "global_batch_size": 128, "micro_batch_size": 4, "sequence_length": 512, "lora_rank": 8,
              "lora_alpha": 16, "lora_dropout": 0.05, "warmup_steps": 100, "train_on": "all", "over_long": "cut",
              "keep_checkpoints": 3, "epochs": 1}  # fmt: skip
    assert {name: preset.values[name] for name in wanted} == wanted
