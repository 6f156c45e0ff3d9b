from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetune.cli.layouts_page import with_rules
from fleetune.cli.main import main
from fleetune.planning.combinations import NO_TENSOR_PLAN, RULES, refusals
from fleetune.planning.engines import choose_engine
from fleetune.planning.rule import Asked
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import read_shape
from fleetune.spec.run_spec import RunSpec


def test_a_rule_that_only_the_model_tells_says_the_same():
    assert NO_TENSOR_PLAN.told("tensor 2 and X").startswith(
        "tensor 2 and X: only the plan says which layers belong together. Give"
    )


def test_every_rule_says_why_and_what_works_instead():
    for rule in RULES:
        assert rule.what and rule.why and rule.instead.startswith(("give", "leave", "use")), rule
    assert len({rule.what for rule in RULES}) == len(RULES)


def test_the_document_has_the_rules_as_they_are():
    page = (Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")
    assert page == with_rules(page), "docs/layouts.md is stale: run make docs"


def test_a_plain_run_collides_with_no_rule(tiny_llama):
    assert refusals(Asked(RunSpec(), Layout(), "replicated", "cpu", read_shape(tiny_llama))) == []


def test_heads_that_do_not_divide_are_refused_with_their_numbers(tiny_llama):
    shape = read_shape(tiny_llama)
    assert (shape.num_heads, shape.num_kv_heads) == (4, 2)
    (problem,) = refusals(Asked(RunSpec(), Layout(tensor=4), "sharded", "cpu", shape))
    assert problem.startswith("tensor 4 does not divide the model's 4 attention heads and 2 heads of keys and values: each")


@pytest.mark.claim(
    "X5",
    command="fleetune train",
    seen="engines behind one contract",
)
def test_data_parallel_is_the_replicated_engines():
    assert choose_engine(RunSpec(), Layout(replicate=4)) == "replicated"


def test_stages_are_the_pipelined_engines_which_refuses_what_it_cannot_combine(tiny_llama):
    assert choose_engine(RunSpec(), Layout(replicate=2, pipeline=2)) == "pipelined"
    (problem,) = refusals(Asked(RunSpec(), Layout(tensor=2, pipeline=2), "pipelined", "cpu", read_shape(tiny_llama)))
    assert problem.startswith("pipeline 2 and tensor 2: ") and "Give --pipeline with --replicate" in problem


@pytest.mark.claim(
    "H26",
    command="fleetune train --replicate 2 --shard 2",
    seen="a layout of axes is planned, and refused where the numbers do not multiply",
)
def test_the_plan_names_the_layout_and_refuses_numbers_that_do_not_multiply(tiny_llama, capsys):
    words = ["plan", "--model", str(tiny_llama), "--device", "cpu", "--gpus", "4"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == {"replicate": 4, "shard": 1, "tensor": 1, "pipeline": 1}
    assert main([*words, "--shard", "3"]) == 2
    assert "shard 3 needs a multiple of 3 processes, and there are 4" in capsys.readouterr().err
