from __future__ import annotations

import subprocess
import sys

import pytest

from fleetune.models.hub import is_hub_id
from fleetune.models.presets import all_presets, find_preset, read_presets, similar_presets
from fleetune.spec.run_spec import fields, from_flat


def test_every_preset_names_a_model_and_gives_values_that_the_spec_takes() -> None:
    presets = all_presets()
    assert {"smollm2-135m", "smollm2-360m", "qwen3-0.6b", "llama-3.2-1b", "tinyllama"} <= {preset.name for preset in presets}
    for preset in presets:
        assert is_hub_id(preset.hub) and preset.about and preset.origin, preset.name
        assert set(preset.values) <= set(fields()), preset.name
        from_flat(preset.values)


def test_a_name_is_found_in_any_case_and_with_underscores() -> None:
    preset = find_preset("smollm2-135m")
    assert preset is not None and find_preset("SmolLM2_135M") == preset
    assert find_preset("smollm2-135") is None and find_preset("") is None


def test_a_mistyped_name_has_suggestions() -> None:
    assert similar_presets("smolm2-135m")[0] == "smollm2-135m"
    assert similar_presets("HuggingFaceTB/SmolLM2-135M")[0] == "smollm2-135m"
    assert similar_presets("completely-else") == []


def test_values_of_a_preset_keep_their_types() -> None:
    text = "m:\n  about: a\n  hub: o/m@refs/pr/3\n  origin: o\n  values: {learning_rate: 1.0e-3, lora_rank: 16}\n"
    (preset,) = read_presets(text, "test")
    assert preset.values == {"learning_rate": 1e-3, "lora_rank": 16}
    assert (preset.hub, preset.revision, preset.package) == ("o/m", "refs/pr/3", None)


@pytest.mark.parametrize("text", ["m: {about: a, hub: o/m}", "m: {about: a, hub: o/m, origin: o, lr: 1}"])
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
