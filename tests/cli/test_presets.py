"""Presets as a person meets them: listed, mistyped, given for another model, and in how a model replies."""

from __future__ import annotations

import json
import shutil

import pytest

from fleetune.cli.generate import drawn
from fleetune.spec.errors import UserError
from fleetune.spec.run_spec import from_flat


def test_the_list_has_the_articles_names_and_a_preset_shows_its_values(command):
    listed = command("presets").stdout
    for name in (
        "llama2_lora_int8",
        "mistral_7b",
        "ministral_3_14b_lora",
        "qwen3_0_6b",
        "gpt_oss_120b",
        "h2ogpt-6.9b",
        "phi-4",
    ):
        assert f"\n{name} " in f"\n{listed}", name
    shown = json.loads(command("presets", "llama2_lora", "--json").stdout)
    assert shown["hub"] == "daryl149/llama-2-7b-chat-hf" and shown["values"]["optimizer"] == "cpu_adam"
    assert shown["generation"] == {"max_new_tokens": 256, "penalty_alpha": 0.6, "top_k": 4}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["presets", "lama2_lora"], "did you mean llama"),
        (["presets", "mistral"], "it is mistral_7b now"),
        (["plan", "--model", "mistral", "--gpus", "1"], "it is mistral_7b now"),
        (["plan", "--model", "generic_lora"], "values alone, for any model"),
        (["plan", "--model", "m", "--preset", "generic_lorra"], "did you mean generic_lora?"),
    ],
)
def test_a_name_that_is_none_is_one_error_with_the_nearest(words, says, command):
    done = command(*words)
    assert done.returncode == 2 and says in done.stderr


@pytest.mark.claim(
    "X14",
    command="fleetune plan --preset gpt_oss_120b_lora --gpus 2",
    seen="accumulation 4 on 2 processes; the global batch is told",
)
def test_a_presets_values_for_another_model_and_a_flag_above_them(command, tiny_llama):
    done = command("plan", "--model", tiny_llama, "--preset", "gpt_oss_120b_lora", "--gpus", "2", "--batch_size", "1", "--json")
    assert done.returncode == 0, done.stderr
    batches = json.loads(done.stdout)
    assert (batches["global_batch_size"], batches["micro_batch_size"]) == (1 * 4 * 2, 1)


def test_a_model_replies_as_its_preset_says_unless_a_person_says_otherwise(command, tiny_llama, tmp_path, monkeypatch):
    shutil.copytree(tiny_llama, tmp_path / "m")

    def reply(*flags):
        done = command("generate", tmp_path / "m", "How many?", "--json", "--max-new-tokens", "8", *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["reply"]

    greedy = reply()
    contrastive = reply("--penalty-alpha", "0.6", "--top-k", "4")
    assert contrastive != greedy
    monkeypatch.setenv("FLEETUNE_PRESET", "llama2")
    assert reply() == contrastive and reply("--temperature", "0") == greedy


def test_a_presets_length_of_replies_counts_below_a_persons():
    spec = from_flat({"model": "m", "preset": "gpt_oss_20b"})
    nothing = dict.fromkeys(("temperature", "top_p", "top_k", "penalty_alpha"))
    settings = drawn(spec, nothing, has_length=False)
    assert (settings.max_new_tokens, settings.penalty_alpha, settings.top_k) == (512, 0.6, 4)
    assert drawn(spec, nothing, has_length=True).max_new_tokens == 128
    for wrong in ({"penalty_alpha": 0.6}, {"penalty_alpha": 0.6, "top_k": 4, "temperature": 1.0}, {"top_p": 0.5}):
        with pytest.raises(UserError):
            drawn(spec, {**nothing, **wrong}, has_length=True)
