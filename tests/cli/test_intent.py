from __future__ import annotations

import os

import pytest

from fleetune.cli.intent import with_plan, work_out
from fleetune.models import presets
from fleetune.models.presets import Preset
from fleetune.spec.errors import UserError
from fleetune.spec.given import arguments_given, file_given
from fleetune.spec.read import read_run, write_run
from fleetune.spec.run_folder import RunFolder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    return tmp_path


def asked(tiny_llama, **values):
    return work_out(arguments_given({"model": tiny_llama, "data": "rows.jsonl", "device": "cpu", **values}))


def test_paths_become_absolute_so_that_a_run_is_read_from_anywhere(here, tiny_llama):
    (here / "chat.jinja").write_text("{{ messages }}")
    relative = os.path.relpath(tiny_llama, here)
    flat = asked(relative, validation="rows.jsonl", run="r", chat_template="chat.jinja").spec.flat()
    assert flat["model"] == str(tiny_llama)
    assert flat["data"] == flat["validation"] == [str(here / "rows.jsonl")]
    assert (flat["run"], flat["chat_template"]) == (str(here / "r"), str(here / "chat.jinja"))


def test_a_run_without_a_name_is_called_after_model_data_and_time(here, tiny_llama):
    folder = asked(tiny_llama).folder.path
    assert folder.parent == here / "runs" and folder.name.startswith("llama-rows-20")
    folder.mkdir(parents=True)
    assert asked(tiny_llama).folder.path != folder
    assert [path.name for path in (here / "runs").iterdir()] == [folder.name]


def test_a_presets_values_count_below_all_that_a_person_gives(here, tiny_llama, monkeypatch):
    preset = Preset("pretty", "", str(tiny_llama), None, None, "", {"learning_rate": 3e-4, "lora_rank": 4, "warmup": 0.2})
    monkeypatch.setitem(presets._presets(), "pretty", preset)
    (here / "run.yaml").write_text("warmup: 0.5\n")
    from fleetune.cli.intent import _resolved

    given = arguments_given({"model": "Pretty", "data": "rows.jsonl", "lora_rank": 2})
    resolved, *_ = _resolved(given, file_given(here / "run.yaml"), ("model", "data"))
    flat = resolved.spec.flat()
    assert (flat["learning_rate"], flat["lora_rank"], flat["warmup"]) == (3e-4, 2, 0.5)
    assert resolved.origins["learning_rate"] == "preset pretty"


def started(here, tiny_llama, **values) -> RunFolder:
    """A run folder as `fleetune train` has written it."""
    intent = asked(tiny_llama, run="r", **values)
    intent.folder.create()
    write_run(intent.folder, with_plan(intent.resolved, intent.plan))
    return intent.folder


def test_the_division_of_a_step_is_written_down_and_stays_on_other_processes(here, tiny_llama):
    folder = started(here, tiny_llama, micro_batch_size=2, gradient_accumulation_steps=3, gpus=2)
    written = read_run(folder)
    assert written.spec.optimization.global_batch_size == 12
    assert written.origins["global_batch_size"] == written.origins["gradient_accumulation_steps"] == "plan"
    assert written.origins["micro_batch_size"] == "argument micro_batch_size"
    again = work_out(arguments_given({"run": "r", "resume": True, "gpus": 1, "device": "cpu"}))
    assert again.plan.batches.global_batch_size == 12 and again.plan.batches.gradient_accumulation_steps == 6


def test_the_same_command_resumes_and_what_is_left_out_stays(here, tiny_llama):
    started(here, tiny_llama, learning_rate=1e-3, micro_batch_size=2, gradient_accumulation_steps=3)
    same = asked(tiny_llama, run="r", learning_rate=1e-3, micro_batch_size=2, gradient_accumulation_steps=3, resume=True)
    less = work_out(arguments_given({"run": "r", "resume": True}))
    assert same.spec.optimization.learning_rate == less.spec.optimization.learning_rate == 1e-3
    assert less.spec.rows.data == (str(here / "rows.jsonl"),)


def test_a_changed_global_batch_is_refused_also_where_it_only_follows(here, tiny_llama):
    started(here, tiny_llama)
    with pytest.raises(UserError) as error:
        work_out(arguments_given({"run": "r", "resume": True, "global_batch_size": 16, "seed": 3}))
    assert [problem.split(" ")[0] for problem in error.value.problems] == ["global_batch_size", "seed"]


def test_resume_of_a_run_that_is_not_there_begins_one(here, tiny_llama):
    intent = asked(tiny_llama, run="new", resume=True)
    assert intent.folder.path == here / "new" and intent.notes == ()


def test_an_adapter_cannot_be_trained_in_full(here, tiny_llama, tmp_path):
    import json

    from safetensors.numpy import save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_llama), "peft_type": "LORA"}))
    import numpy as np

    save_file({"a": np.zeros((3, 5), np.float32)}, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="--method lora to go on with"):
        asked(adapter, method="full")
    assert asked(adapter).plan.trainable_parameters == 15
