from __future__ import annotations

import subprocess
import sys

import pytest

from fleetune.models.hub import is_hub_id
from fleetune.models.presets import all_presets, find_preset, read_presets, refuse_moved, similar_presets
from fleetune.spec.errors import UserError
from fleetune.spec.run_spec import fields, from_flat


@pytest.mark.claim(
    "H3",
    command="fleetune presets",
    seen="presets from 82M to 235B; h2oGPT's 6.9B, 12B, 20B, 70B",
)
@pytest.mark.claim(
    "X47",
    command="fleetune presets",
    seen="presets of every class",
)
def test_every_preset_names_a_model_and_gives_values_that_the_spec_takes() -> None:
    presets = all_presets()
    assert {"smollm2-135m", "smollm2-360m", "qwen3-0.6b", "llama-3.2-1b", "tinyllama"} <= {preset.name for preset in presets}
    for preset in presets:
        assert preset.about and preset.origin, preset.name
        assert is_hub_id(preset.hub) if preset.hub else preset.name.startswith(("generic", "h2ogpt_finetune")), preset.name
        assert set(preset.values) <= {*fields(), "quantize"}, preset.name
        from_flat({name: value for name, value in preset.values.items() if name in fields()})
        assert set(preset.generation) <= {"max_new_tokens", "temperature", "top_p", "top_k", "penalty_alpha"}, preset.name


def values_of(name: str) -> tuple[float, int, int, int, float, int, float, str]:
    preset = find_preset(name)
    assert preset is not None, name
    v = preset.values
    return (
        v["learning_rate"], v["micro_batch_size"], v["gradient_accumulation_steps"], v["sequence_length"], v["epochs"],
        v["warmup_steps"], v["weight_decay"], v["optimizer"],
    )  # fmt: skip


#: learning rate, batch, accumulation, length, epochs, warmup, weight decay, optimizer; as the articles and xTuring's file say.
XTURING = {
    "gpt_oss_120b": (1e-5, 1, 8, 2048, 1, 100, 0.01, "adamw"),
    "gpt_oss_120b_lora": (2e-4, 2, 4, 2048, 3, 100, 0.01, "adamw"),
    "gpt_oss_20b_lora_kbit": (3e-4, 16, 1, 2048, 3, 100, 0.01, "adamw"),
    "minimax_m2_lora_int8": (2e-4, 4, 2, 2048, 3, 100, 0.01, "adamw"),
    "llama2_lora": (5e-5, 1, 1, 512, 3, 50, 0.01, "cpu_adam"),
    "llama2_lora_int8": (5e-5, 1, 1, 512, 3, 50, 0.01, "cpu_adam"),
    "llama_lora": (1e-4, 1, 1, 512, 3, 50, 0.01, "adamw"),
    "llama_lora_kbit": (3e-4, 1, 1, 256, 3, 50, 1e-5, "adamw"),
    "qwen3_0_6b": (5e-5, 1, 1, 512, 3, 50, 0.01, "adamw"),
    "qwen3_0_6b_lora": (1e-4, 4, 1, 512, 3, 50, 0.01, "adamw"),
    "gpt2": (1e-3, 8, 1, 512, 3, 50, 0.01, "adamw"),
    "distilgpt2_lora": (3e-3, 16, 1, 512, 3, 50, 0.01, "adamw"),
    "falcon": (5e-5, 1, 1, 256, 3, 50, 0.01, "adamw"),
    "falcon_lora": (1e-4, 1, 1, 512, 3, 50, 0.01, "adamw"),
    "mamba": (5e-5, 1, 1, 512, 1, 50, 0.01, "adamw"),
    "generic_lora": (1e-4, 8, 1, 256, 3, 50, 0.01, "adamw"),
}
_ALL = "bloom cerebras falcon galactica gpt2 gptj gpt_oss_20b gpt_oss_120b llama llama2 minimax_m2 opt qwen3_0_6b generic"
FAMILIES = {
    "": f"{_ALL} distilgpt2 mamba",
    "_lora": f"{_ALL} distilgpt2",
    "_int8": _ALL,
    "_lora_int8": _ALL,
    "_lora_kbit": "falcon gpt_oss_20b gpt_oss_120b llama llama2 minimax_m2 qwen3_0_6b generic",
}


@pytest.mark.claim(
    "X7",
    command="fleetune presets gpt_oss_120b",
    seen="16 presets compared value by value; each is a field that a run reads",
)
@pytest.mark.claim(
    "X11",
    command="fleetune presets gpt_oss_120b",
    seen="1e-5, batch 1, accumulation 8, length 2048",
)
@pytest.mark.claim(
    "X13",
    command="fleetune presets llama2_lora",
    seen="5e-5, batch 1, cpu_adam",
)
@pytest.mark.parametrize("name", XTURING)
def test_a_preset_of_xturing_has_exactly_its_values(name: str) -> None:
    assert values_of(name) == XTURING[name]


def test_every_model_key_of_xturing_is_there_and_no_other() -> None:
    wanted = {family + suffix for suffix, families in FAMILIES.items() for family in families.split()}
    assert len(wanted) == 67
    assert {preset.name for preset in all_presets() if preset.origin.startswith("xTuring")} == wanted


@pytest.mark.claim(
    "X12",
    command="fleetune presets ministral_3_14b_lora",
    seen="2e-4, batch 2, accumulation 4, length 2048",
)
def test_a_suffix_says_how_a_model_is_trained() -> None:
    asked = {
        "": {"method": "full"},
        "_lora": {"method": "lora"},
        "_int8": {"method": "full", "quantize": "int8"},
        "_lora_int8": {"method": "lora", "quantize": "int8"},
        "_lora_kbit": {"method": "lora", "quantize": "nf4"},
    }
    for suffix, families in FAMILIES.items():
        for family in families.split():
            preset = find_preset(family + suffix)
            assert preset is not None
            assert {name: preset.values[name] for name in ("method", "quantize") if name in preset.values} == asked[suffix]
            assert ("lora_dropout" in preset.values) == ("lora" in suffix)
    ministral = find_preset("ministral_3_14b_lora")
    assert ministral is not None and ministral.values == {
        "method": "lora", "learning_rate": 2e-4, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
        "sequence_length": 2048,
    }  # fmt: skip
    derived = find_preset("mixtral_8x7b_lora_kbit")
    assert derived is not None and derived.values == {"method": "lora", "quantize": "nf4"}
    assert derived.hub == "mistralai/Mixtral-8x7B-Instruct-v0.1"
    assert find_preset("mamba_lora") is None and find_preset("nothing_lora") is None


def test_a_name_that_moved_says_where_to() -> None:
    for old, new in (("mistral_lora", "mistral_7b_lora"), ("Mixtral", "mixtral-8x7b"), ("llama_lora_int4", "llama_lora_kbit")):
        with pytest.raises(UserError, match=f"it is {new} now"):
            refuse_moved(old)
        assert find_preset(old) is None and find_preset(new) is not None
    with pytest.raises(UserError, match="draws images"):
        refuse_moved("stable_diffusion")
    refuse_moved("mistral_7b")


def test_a_name_is_found_in_any_case_and_with_underscores() -> None:
    preset = find_preset("smollm2-135m")
    assert preset is not None and find_preset("SmolLM2_135M") == preset
    assert find_preset("smollm2-135") is None and find_preset("") is None


def test_a_mistyped_name_has_suggestions() -> None:
    assert similar_presets("smolm2-135m")[0] == "smollm2-135m"
    assert similar_presets("HuggingFaceTB/SmolLM2-135M")[0] == "smollm2-135m"
    assert similar_presets("completely-else") == []


def test_values_of_a_preset_keep_their_types() -> None:
    text = "m:\n  about: a\n  hub: o/m@refs/pr/3\n  origin: o\n  values: {learning_rate: 1e-3, lora_rank: 16}\n"
    (preset,) = read_presets(text, "test")
    assert preset.values == {"learning_rate": 1e-3, "lora_rank": 16}
    assert (preset.hub, preset.revision, preset.package) == ("o/m", "refs/pr/3", None)


@pytest.mark.parametrize("text", ["m: {about: a}", "m: {about: a, hub: o/m, origin: o, lr: 1}"])
def test_a_preset_that_is_half_written_is_an_error_of_the_file(text: str) -> None:
    with pytest.raises(ValueError, match=r"test\.yaml: preset m"):
        list(read_presets(text, "test.yaml"))


def test_presets_are_found_without_torch_and_transformers() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from fleetune.models.presets import find_preset\n"
        "assert find_preset('smollm2-135m').hub"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_preset_files_are_in_the_wheel(tmp_path: object) -> None:
    """The build's own list of files: hatch takes what is in the package and not ignored by git."""
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed here")
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    files = {file.distribution_path for file in hatchling.WheelBuilder(str(root)).recurse_included_files()}
    presets = {f"fleetune/models/presets/{path.name}" for path in (root / "src/fleetune/models/presets").glob("*.yaml")}
    assert presets and presets <= files
