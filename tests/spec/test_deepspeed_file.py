"""A person's own DeepSpeed JSON: what it says of a run, what DeepSpeed gets, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_article import ARTICLE
from fleetune.spec.deepspeed_file import DeepSpeedFile, read_deepspeed
from fleetune.spec.errors import UserError
from fleetune.spec.given import flags_given
from fleetune.spec.read import resolve

#: As the documentation of another trainer has it.
COMMON = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def read(folder: Path, settings: Any) -> DeepSpeedFile:
    path = folder / "ds.json"
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return read_deepspeed(path)


def problems(folder: Path, settings: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        read(folder, settings)
    return list(caught.value.problems)


def test_the_articles_file_is_taken_as_it_is(tmp_path: Path) -> None:
    found = read(tmp_path, ARTICLE)
    assert found.source.values == {
        "global_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "learning_rate": 5e-5,
        "zero_stage": 2,
        "offload": "optimizer",
        "precision": "fp16",
    }
    assert found.options == {"fp16": {"loss_scale": 0, "loss_scale_window": 1000}}
    assert found.source.origin("learning_rate") == f"file {tmp_path}/ds.json, optimizer.params.lr"


def test_auto_leaves_the_choice_open_and_notes_name_what_has_no_effect(tmp_path: Path) -> None:
    found = read(tmp_path, COMMON)
    assert found.source.values == {"zero_stage": 3, "offload": "parameters"}
    assert found.options == {
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9,
            "offload_optimizer": {"pin_memory": True},
            "offload_param": {"pin_memory": True},
        },
    }
    assert any("fp16.hysteresis" in note for note in found.notes)
    assert any("stage3_gather_16bit_weights_on_model_save" in note for note in found.notes)
    assert len(found.notes) == 2


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"train_bach_size": 8}, ["no setting train_bach_size", "did you mean train_batch_size"]),
        ({"zero_optimization": {"stge": 2}}, ["zero_optimization.stge", "zero_optimization.stage"]),
        ({"optimizer": {"type": "Lamb", "params": {}}}, ["Lamb", "AdamW"]),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, ["optimizer.params.learning_rate"]),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, ["scheduler", "--schedule"]),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, ["nvme", '"cpu"']),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, ["zero_quantized_gradients"]),
        ({"zero_optimization": {"overlap_comm": 3}}, ["overlap_comm", "true or false"]),
        ({"zero_optimization": True}, ["zero_optimization", "an object"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["both true"]),
        ({"tensorboard": {"enabled": True}}, ["--tensorboard"]),
        ('{"train_batch_size": 8, "train_batch_size": 16}', ["train_batch_size twice"]),
        ('{"train_batch_size": }', ["no JSON", "line 1"]),
        ("[1]", ["no object"]),
    ],
)
def test_what_cannot_be_taken_is_named_with_a_way_out(tmp_path: Path, settings: Any, wanted: list[str]) -> None:
    (problem,) = problems(tmp_path, settings)
    assert all(word in problem for word in wanted), problem


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, {"scheduler": {"type": "OneCycle"}, "amp": {"enabled": True}, "tarin": 1})
    assert len(found) == 3


def test_settings_that_ask_for_nothing_are_no_problem(tmp_path: Path) -> None:
    off = {"tensorboard": {"enabled": False}, "amp": {"enabled": False}, "gradient_predivide_factor": 1.0, "elasticity": None}
    assert read(tmp_path, off).source.values == {}


@pytest.mark.parametrize(("settings", "wanted"), [({}, {}), ({"adam_w_mode": False}, {"optimizer": "adam"})])
def test_adam_is_adamw_unless_the_file_says_otherwise(tmp_path: Path, settings: Any, wanted: Any) -> None:
    assert read(tmp_path, {"optimizer": {"type": "Adam", "params": settings}}).source.values == wanted


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.json"):
        read_deepspeed(tmp_path / "nothing.json")


def test_a_flag_that_says_another_thing_than_the_file_is_never_resolved_silently(tmp_path: Path) -> None:
    found = read(tmp_path, ARTICLE)
    with pytest.raises(UserError) as caught:
        resolve(flags=flags_given({"learning_rate": "1e-4", "zero_stage": "3"}), foreign=found.source, required=())
    learning_rate, stage = caught.value.problems
    assert "1e-4" in learning_rate and "flag --learning-rate" in learning_rate and "optimizer.params.lr" in learning_rate
    assert "flag --zero-stage" in stage and "zero_optimization.stage" in stage


def test_a_flag_that_says_the_same_is_fine(tmp_path: Path) -> None:
    found = read(tmp_path, ARTICLE)
    resolved = resolve(flags=flags_given({"learning_rate": "0.00005"}), foreign=found.source, required=())
    assert resolved.spec.optimization.learning_rate == 5e-5
    assert resolved.origins["learning_rate"] == "flag --learning-rate"
    assert resolved.origins["offload"].endswith("zero_optimization.offload_optimizer")


def test_a_value_that_no_field_takes_is_refused_with_its_place(tmp_path: Path) -> None:
    found = read(tmp_path, {"train_batch_size": "many"})
    with pytest.raises(UserError, match="train_batch_size"):
        resolve(foreign=found.source, required=())
