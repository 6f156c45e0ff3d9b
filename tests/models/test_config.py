"""Each rule for a stranger's config, with the attack it is for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import tiny
from fleetune.models.config import CONFIG_FILE, allowed_values, load_config
from fleetune.spec.errors import UserError

EVIL = "import pathlib\npathlib.Path({marker!r}).touch()\n"


def write_config(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    known = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    (folder / CONFIG_FILE).write_text(json.dumps({**known, **values}), encoding="utf-8")
    return folder


def with_code(folder: Path, marker: Path, **values: Any) -> Path:
    """A model folder whose code leaves `marker` behind as soon as it is imported."""
    code = EVIL.format(marker=str(marker)) + (
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class EvilConfig(LlamaConfig):\n    model_type = 'evil'\n"
        "class EvilModel(LlamaForCausalLM):\n    config_class = EvilConfig\n"
    )
    auto_map = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilModel"}
    write_config(folder, auto_map=auto_map, **values)
    (folder / "modeling_evil.py").write_text(code, encoding="utf-8")
    return folder


def test_a_config_means_the_same_as_to_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for family, overrides in tiny.FAMILIES.items():
        layers = {"num_hidden_layers": 2} if "layer_types" in overrides else {}
        AutoConfig.for_model(family, **overrides, **layers).save_pretrained(tmp_path / family)
        ours = load_config(tmp_path / family).to_dict()
        theirs = AutoConfig.from_pretrained(tmp_path / family).to_dict()
        for config in (ours, theirs):
            config.pop("_name_or_path", None)
        assert ours == theirs, family


def test_old_spellings_are_understood(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = load_config(write_config(tmp_path / "m", rope_theta=5000.0, rope_scaling=scaling, torch_dtype="bfloat16"))
    assert config.rope_parameters == {"rope_theta": 5000.0, **scaling}
    assert str(config.dtype) == "torch.bfloat16"


def test_code_beside_a_config_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = with_code(tmp_path / "m", marker, model_type="evil")
    with pytest.raises(UserError, match=r"modeling_evil\.py.*--allow-remote-code"):
        load_config(folder)
    assert not marker.exists()


def test_code_that_hides_behind_a_known_family_is_not_run(tmp_path: Path) -> None:
    """model_type is a known one, so nobody has to ask for the code: auto_map must have no effect."""
    from transformers import AutoModelForCausalLM

    marker = tmp_path / "ran"
    config = load_config(with_code(tmp_path / "m", marker))
    model = AutoModelForCausalLM.from_config(config)
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    assert not hasattr(config, "auto_map") and not marker.exists()


def test_allowed_code_is_named_before_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers copies the code into a folder of the person before it imports it
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "ran"
    folder = with_code(tmp_path / "m", marker, model_type="evil")
    with caplog.at_level(logging.WARNING):
        config = load_config(folder, allow_remote_code=True)
    assert marker.exists() and type(config).__name__ == "EvilConfig"
    assert "modeling_evil.py" in caplog.text


def test_code_of_another_repository_is_refused_even_where_code_is_allowed(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", model_type="x", auto_map={"AutoConfig": "someone/else--evil.EvilConfig"})
    with pytest.raises(UserError, match="someone/else"):
        load_config(folder, allow_remote_code=True)


@pytest.mark.parametrize(
    "key",
    [
        "_attn_implementation_internal",
        "_attn_implementation",
        "attn_implementation",
        "_experts_implementation_internal",
        "experts_implementation",
    ],
)
def test_a_config_cannot_choose_kernels(key: str, tmp_path: Path) -> None:
    """CVE-2026-4372: a kernel repository named here was fetched and run, with trust_remote_code off."""
    config = load_config(write_config(tmp_path / "m", **{key: "someone/evil-kernel"}))
    assert "someone/evil-kernel" not in json.dumps({name: str(value) for name, value in vars(config).items()})


def test_dangerous_keys_are_taken_out_at_any_depth(tmp_path: Path) -> None:
    nested = {"rope_type": "default", "deep": [{"auto_map": {"AutoConfig": "x.Y"}, "_attn_implementation": "a/b", "kept": 1}]}
    kept, dropped = allowed_values({"rope_scaling": nested, "auto_map": {"AutoConfig": "x.Y"}}, frozenset())
    assert kept == {"rope_scaling": {"rope_type": "default", "deep": [{"kept": 1}]}}
    assert dropped == {"auto_map"}


def test_undeclared_keys_are_read_only_when_they_are_numbers(tmp_path: Path) -> None:
    """CVE-2026-5241: a key that nobody had thought of named code. A number can name nothing."""
    config = load_config(
        write_config(tmp_path / "m", next_cve="someone/evil", also={"repo": "a/b"}, list=["a/b"], n_inner=7, sizes=[1, 2])
    )
    assert not any(hasattr(config, name) for name in ("next_cve", "also", "list"))
    assert config.n_inner == 7 and config.sizes == [1, 2]


def test_a_dtype_that_is_no_number_format_is_refused(tmp_path: Path) -> None:
    for dtype in ("load", "float8_e4m3fn", 7):
        with pytest.raises(UserError, match="float32"):
            load_config(write_config(tmp_path / "m", dtype=dtype))


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"quantised \(mxfp4\)"):
        load_config(write_config(tmp_path / "m", quantization_config={"quant_method": "mxfp4"}))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "nul", '"x"', "[" * 200_000, "\ud800"],
    ids=["empty", "list", "cut", "word", "text", "deep", "surrogate"],
)
def test_what_is_no_config_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / CONFIG_FILE, "wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(UserError, match="8,589,934,592 bytes"):
        load_config(tmp_path)


def test_values_that_no_model_of_the_family_has_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="llama"):
        load_config(write_config(tmp_path / "m", hidden_size="many"))


def test_an_unknown_family_is_named_with_the_version_that_does_not_know_it(tmp_path: Path) -> None:
    import transformers

    with pytest.raises(UserError, match=f"'llama9'.*{transformers.__version__}"):
        load_config(write_config(tmp_path / "m", model_type="llama9"))
