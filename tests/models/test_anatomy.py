"""The parts of a model are found from its structure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetune.models.anatomy import Anatomy
from fleetune.models.build import empty_module
from fleetune.spec.errors import UserError

#: name -> (embedding, positions, blocks, final norm, head, linears, conv1ds)
EXPECTED = {
    "llama": ("model.embed_tokens", None, "model.layers", "model.norm", "lm_head", 7, 0),
    "mixtral": ("model.embed_tokens", None, "model.layers", "model.norm", "lm_head", 4, 0),
    "gpt2": ("transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head", 4, 4),
    "gpt_neox": ("gpt_neox.embed_in", None, "gpt_neox.layers", "gpt_neox.final_layer_norm", "lm_head", 4, 0),
    "falcon": ("transformer.word_embeddings", None, "transformer.h", "transformer.ln_f", "lm_head", 4, 0),
    "bloom": ("transformer.word_embeddings", None, "transformer.h", "transformer.ln_f", "lm_head", 4, 0),
    "opt with projections": (
        *("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.layers"),
        *("model.decoder.final_layer_norm", "lm_head", 6, 0),
    ),
    "opt with the norm behind": (
        *("model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.layers", None, "lm_head", 6, 0),
    ),
    "gptj": ("transformer.wte", None, "transformer.h", "transformer.ln_f", "lm_head", 6, 0),
    "gpt_oss": ("model.embed_tokens", None, "model.layers", "model.norm", "lm_head", 4, 0),
    "phi": ("model.embed_tokens", None, "model.layers", "model.final_layernorm", "lm_head", 6, 0),
    "mamba": ("backbone.embeddings", None, "backbone.layers", "backbone.norm_f", "lm_head", 4, 0),
}


def anatomy_of(folder) -> tuple[nn.Module, Anatomy]:
    module = empty_module(folder, dtype=torch.float32)
    return module, Anatomy.of(module)


@pytest.mark.claim(
    "X8",
    command="fleetune train",
    seen="one engine for every family: 13 of them, by their anatomy",
)
@pytest.mark.parametrize("name", EXPECTED)
def test_the_parts_of_a_family_are_found(name, model_folder):
    _, anatomy = anatomy_of(model_folder(name))
    found = (anatomy.embedding, anatomy.positions, anatomy.blocks, anatomy.final_norm, anatomy.head)
    assert (*found, len(anatomy.linears), len(anatomy.conv1ds)) == EXPECTED[name]


def test_every_part_is_there_and_together_they_are_the_whole_model(any_model, model_folder):
    """Each parameter lies in exactly one part: pipeline stages cut by these names lose nothing."""
    module, anatomy = anatomy_of(model_folder(any_model))
    parts = [anatomy.embedding, anatomy.positions, anatomy.final_norm, anatomy.head, *anatomy.outside]
    blocks = tuple(f"{block}." for block in anatomy.block_names())
    for name, _ in module.named_parameters():
        assert parts.count(name.rpartition(".")[0]) + name.startswith(blocks) == 1, name
    assert anatomy.num_blocks == 2 and anatomy.hidden_size == 48
    for block in anatomy.block_names():
        for name in anatomy.linears:
            assert module.get_submodule(f"{block}.{name}").weight.ndim == 2
        for name in anatomy.experts:
            assert module.get_parameter(f"{block}.{name}").ndim == 3


def test_stacked_experts_are_told_from_linears(model_folder):
    for name in ("mixtral", "gpt_oss"):
        _, anatomy = anatomy_of(model_folder(name))
        assert anatomy.experts == ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        assert not set(anatomy.experts) & set(anatomy.linears)


def test_projections_around_the_blocks_are_outside(model_folder):
    _, anatomy = anatomy_of(model_folder("opt with projections"))
    assert set(anatomy.outside) == {"model.decoder.project_out", "model.decoder.project_in"}
    assert anatomy_of(model_folder("bloom"))[1].outside == ("transformer.word_embeddings_layernorm",)


def test_only_models_with_a_state_are_recurrent(any_model, model_folder):
    _, anatomy = anatomy_of(model_folder(any_model))
    assert anatomy.recurrent == (any_model == "mamba")


def test_linears_that_a_kernel_bypasses_are_named(model_folder):
    assert set(anatomy_of(model_folder("mamba"))[1].bypassed) >= {"mixer.out_proj", "mixer.dt_proj"}
    assert anatomy_of(model_folder("bloom"))[1].bypassed == ()


def test_a_convolution_in_a_block_is_a_state_even_where_nobody_says_so(model_folder):
    module, anatomy = anatomy_of(model_folder("llama"))
    assert not anatomy.recurrent
    module.model.layers[1].self_attn.shift = nn.Conv1d(48, 48, 3, groups=48)
    assert Anatomy.of(module).recurrent


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        (
            "t5",
            {"d_model": 48, "num_layers": 2, "num_heads": 4, "d_kv": 12, "d_ff": 96, "vocab_size": 100},
            "encoder and a decoder",
        ),
        ("bert", {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}, "output head"),
    ],
)
def test_a_model_without_the_usual_parts_is_refused_in_plain_words(family, sizes, words):
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(family, **sizes))
    with pytest.raises(UserError, match=words):
        Anatomy.of(model)
