"""What a plan says of a quantised base."""

from __future__ import annotations

import pytest

import tiny
from fleetune.planning.combinations import Asked, refusals
from fleetune.planning.explain import explain
from fleetune.planning.plan import make_plan
from fleetune.spec.errors import UserError
from fleetune.spec.given import flags_given
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import read_shape
from fleetune.spec.quantized import quantized_bytes
from fleetune.spec.read import resolve


def planned(folder, **values):
    spec = resolve(flags=flags_given({"model": "m", "data": "d", "sequence_length": 128, **values})).spec
    return make_plan(spec, read_shape(folder), layout=Layout(1))


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_only_the_linears_of_the_blocks_get_smaller(tiny_llama, scheme):
    plain, small = planned(tiny_llama, precision="bf16"), planned(tiny_llama, precision="bf16", quantize=scheme)
    shapes = [(linear.num_out, linear.num_in) for linear in read_shape(tiny_llama).linears]
    dense = sum(2 * out * into for out, into in shapes)
    resting = sum(quantized_bytes(scheme, *shape) for shape in shapes)
    assert small.memory.quantized_bytes == resting
    assert plain.memory.frozen_bytes - small.memory.frozen_bytes == dense - resting
    assert small.memory.optimizer_bytes == plain.memory.optimizer_bytes
    assert small.to_json()["quantize"] == scheme and small.to_json()["rank_memory"]["quantized_bytes"] == resting


def test_the_saving_is_said(tiny_llama):
    said = dict(explain(planned(tiny_llama, precision="bf16", method="qlora")))
    assert said["base"] == "nf4, 41,472 weights in 21.5 kB instead of 82.9 kB in bf16: 61.4 kB saved"
    assert "base" not in dict(explain(planned(tiny_llama)))


def test_stacked_experts_stay_and_the_plan_says_so(tmp_path):
    plan = planned(tiny.write_model(tmp_path / "mixtral", "mixtral"), quantize="nf4")
    assert any("leaves the stacked experts as they are: 110,592 of" in note for note in plan.notes)


def test_a_model_without_linear_layers_is_refused(tiny_llama, monkeypatch):
    shape = read_shape(tiny_llama)
    shape.__dict__["linears"] = ()
    spec = resolve(flags=flags_given({"model": "m", "data": "d", "quantize": "int8", "lora_targets": "q_proj"})).spec
    with pytest.raises(UserError, match="quantize int8 makes the linear layers of the blocks smaller, and none were found"):
        make_plan(spec, shape, layout=Layout(1))


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_what_cannot_be_is_refused_with_what_works(tiny_llama, scheme):
    with pytest.raises(UserError, match=rf"quantize {scheme} with method full: .*Give --method lora"):
        planned(tiny_llama, method="full", quantize=scheme)
    spec = resolve(flags=flags_given({"model": "m", "data": "d", "quantize": scheme})).spec
    pieces = resolve(flags=flags_given({"model": "m", "data": "d", "quantize": scheme, "zero_stage": 3})).spec
    for asked, layout, engine in (
        (spec, Layout(shard=2), "native"),
        (spec, Layout(pipeline=2), "native"),
        (pieces, Layout(2), "deepspeed"),
    ):
        (problem,) = refusals(Asked(asked, layout, engine, "cpu"))
        assert f"quantize {scheme} with" in problem and "Give --replicate" in problem
    for engine in ("native", "deepspeed"):
        assert not refusals(Asked(spec, Layout(2), engine, "cpu"))
