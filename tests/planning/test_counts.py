"""Counts of the plan against the real thing: transformers' models and PEFT's adapters, for every family."""

from __future__ import annotations

import pytest

import tiny
from fleetune.planning.plan import make_plan
from fleetune.spec.given import flags_given
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import read_shape
from fleetune.spec.read import resolve


@pytest.fixture(scope="module", params=list(tiny.FAMILIES))
def family(request, tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("families") / request.param, request.param)


def planned(folder, **values):
    spec = resolve(flags=flags_given({"model": "m", "data": "d", "sequence_length": 128, **values})).spec
    return make_plan(spec, read_shape(folder), layout=Layout(1))


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_parameters_are_those_of_the_model(family):
    model = load(family)
    plan = planned(family, method="full")
    assert plan.num_parameters == plan.trainable_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("adapter", ["lora", "dora", "rslora"])
def test_trained_parameters_are_those_of_peft_on_all_linears_of_the_blocks(family, adapter):
    from peft import LoraConfig, get_peft_model

    from fleetune.models.anatomy import Anatomy

    model = load(family)
    anatomy = Anatomy.of(model)
    modules = dict(model.named_modules())
    targets = [f"{block}.{name}" for block in anatomy.block_names() for name in anatomy.linears]
    config = LoraConfig(
        r=4,
        target_modules=[name for name in targets if name in modules],
        use_dora=adapter == "dora",
        use_rslora=adapter == "rslora",
        fan_in_fan_out=bool(anatomy.conv1ds),
    )
    trained, everything = get_peft_model(model, config).get_nb_trainable_parameters()
    plan = planned(family, adapter=adapter, lora_rank=4)
    assert plan.trainable_parameters == trained
    assert plan.trainable_share == pytest.approx(trained / everything)


def test_named_targets_are_those_of_our_adapter(tiny_llama):
    from peft import LoraConfig, get_peft_model

    for targets in (["q_proj"], ["v_proj", "down_proj"], ["self_attn.o_proj"]):
        config = LoraConfig(r=4, target_modules=targets)
        trained, _ = get_peft_model(load(tiny_llama), config).get_nb_trainable_parameters()
        assert planned(tiny_llama, lora_rank=4, lora_targets=",".join(targets)).trainable_parameters == trained
