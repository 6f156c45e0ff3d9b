from __future__ import annotations

import pytest
import torch

import tiny
from fleetune.models.wanted import WantedAdapter, WantedModel, load_stage
from fleetune.planning.combinations import refusals
from fleetune.planning.engines import choose_engine
from fleetune.planning.plan import make_plan
from fleetune.planning.rule import Asked
from fleetune.planning.stages import waiting_share
from fleetune.spec.agreement import without_effect
from fleetune.spec.errors import UserError
from fleetune.spec.given import flags_given
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import read_shape
from fleetune.spec.read import resolve
from fleetune.spec.stages import RUNS_PER_RANK, Stage


def resolved(**values):
    return resolve(flags=flags_given({"model": "m", "data": "d", "pipeline": 2, **values}))


def problems(shape, layout, **values):
    with pytest.raises(UserError) as error:
        make_plan(resolved(**values).spec, shape, layout=layout)
    return error.value.problems


@pytest.mark.parametrize("axis", ["tensor", "shard"])
def test_what_does_not_go_with_a_pipeline_is_refused_with_what_does(tiny_llama, axis):
    layout = Layout(pipeline=2, **{axis: 2})
    (problem,) = refusals(Asked(resolved().spec, layout, choose_engine(resolved().spec, layout), "cpu", read_shape(tiny_llama)))
    assert problem.startswith(f"pipeline 2 and {axis} 2: ") and "Give --pipeline with --replicate" in problem


def test_too_few_blocks_are_refused_before_anything_loads(tiny_llama):
    shape = read_shape(tiny_llama)  # two blocks
    (problem,) = problems(shape, Layout(pipeline=3))
    assert problem.startswith("pipeline 3 makes 3 runs of blocks, and the model has 2 blocks: ")
    (problem,) = problems(shape, Layout(pipeline=2), pipeline_schedule="interleaved")
    assert problem.startswith(
        "pipeline 2 makes 4 runs of blocks, 2 on each rank (pipeline_schedule interleaved), and the model"
    )


def test_a_schedule_without_a_pipeline_would_have_no_effect():
    (problem,) = without_effect(resolved(pipeline=1, pipeline_schedule="interleaved"))
    assert problem.startswith("pipeline_schedule interleaved (flag --pipeline-schedule) orders the stages of a pipeline: give")
    assert not list(without_effect(resolved(pipeline_schedule="interleaved")))


def test_the_wait_of_a_step_is_told(tiny_llama):
    assert waiting_share(4, 2, 1) == pytest.approx(1 / 5)
    assert waiting_share(4, 2, 2) == pytest.approx(0.5 / 4.5)
    assert waiting_share(1, 4, 1) == pytest.approx(3 / 4)
    plan = make_plan(resolved(global_batch_size=4, micro_batch_size=1).spec, read_shape(tiny_llama), layout=Layout(pipeline=2))
    assert any(
        "with 4 micro-batches on each data rank for 2 stages, a rank waits 20 % of a step" in note for note in plan.notes
    )


@pytest.mark.parametrize("schedule", RUNS_PER_RANK)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "phi"])
@pytest.mark.parametrize("method", ["full", "dora"])
def test_the_planned_bytes_are_those_of_the_largest_stage(tmp_path, family, method, schedule):
    """Blocks that do not divide evenly; heads that are tied and not; biases; a table of positions."""
    layers = {"n_layer": 5} if family == "gpt2" else {"num_hidden_layers": 5}
    folder = tiny.write_model(tmp_path / family, family, **layers)
    values = {"method": "full"} if method == "full" else {"method": "lora", "adapter": "dora", "lora_rank": 3}
    spec = resolved(**values, precision="fp32", sequence_length=64, pipeline_schedule=schedule).spec
    planned = make_plan(spec, read_shape(folder), layout=Layout(pipeline=2)).memory
    adapter = None if method == "full" else WantedAdapter("dora", 3, 16.0, 0.0, ())
    found = []
    for rank in range(2):
        wanted = WantedModel(folder, "fp32", adapter=adapter)
        model = load_stage(wanted, torch.device("cpu"), Stage.of_rank(rank, 2, schedule))
        parameters = [p for p in model.module.parameters() if not p.is_meta]
        trained = sum(p.numel() for _, p in model.trained())
        found.append((4 * sum(p.numel() for p in parameters), 8 * trained))
    assert (planned.parameter_bytes, planned.optimizer_bytes) == max(found, key=lambda pair: pair[0] + 1.5 * pair[1])
