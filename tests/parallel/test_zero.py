"""DeepSpeed on real ranks: every stage has the losses, gradients and weights of one process, and its state goes in and out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from parallel import toy, zero_cases
from parallel.ranks import Ranks

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'fleetune[deepspeed]'")

STAGES = (0, 1, 2, 3)
PATIENCE_S = 270.0


@pytest.fixture(scope="module")
def run(ranks: Ranks) -> Any:
    """`run(function, world size, *arguments)`; the same call is made once."""
    known: dict[Any, list[Any]] = {}

    def call(function: Any, world_size: int, *arguments: Any) -> list[Any]:
        key = (function, world_size, repr(arguments))
        if key not in known:
            known[key] = ranks.run(function, world_size, *arguments, patience_s=PATIENCE_S)
        return known[key]

    return call


def compare(rows: list[list[float]], expected: list[list[float]], *, first: float, later: float) -> None:
    for step, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
        assert row[0] == pytest.approx(wanted[0], rel=first if step == 0 else later)
        assert row[1] == pytest.approx(wanted[1], rel=max(later, 1e-5)), f"gradient norm of step {step}"
        assert row[2:] == wanted[2:]


@pytest.mark.claim(
    "X26",
    command="fleetune train --zero-stage 3",
    seen="parameters in pieces, the losses of one process",
)
@pytest.mark.claim(
    "X4",
    command="fleetune train --zero-stage 0|1|2|3",
    seen="losses and gradients of every stage are those of one process",
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_losses_and_gradients_are_those_of_one_process(run: Any, world_size: int, stage: int) -> None:
    """Shares, micro-batches and ranks have unequal trained tokens (`test_native.test_a_mean_of_means_would_be_seen`)."""
    (one,) = run(zero_cases.stages, 1, [None], 10, {})[0]
    answers = [answer[stage] for answer in run(zero_cases.stages, world_size, STAGES, 10, {})]
    assert len({answer["fingerprint"] for answer in answers}) == 1, "the ranks' weights have drifted apart"
    assert all(answer["rows"] == answers[0]["rows"] for answer in answers)
    compare(answers[0]["rows"], one["rows"], first=1e-6, later=1e-5)
    for values, wanted in zip(answers[0]["parameters"], one["parameters"], strict=True):
        assert values == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.long), "fp16"])
def test_low_precision_with_clipping_is_that_of_one_process(run: Any, precision: str, stage: int) -> None:
    """DeepSpeed's own stage 0 in low precision clips the scaled gradient, and tells its norm: here it must not."""
    options = {"precision": precision, "clip": 0.1}
    (one,) = run(zero_cases.stages, 1, [None], 8, options)[0]
    answer = run(zero_cases.stages, 2, STAGES, 8, options)[0][stage]
    finite = [row[1] for row in one["rows"] if math.isfinite(row[1])]
    assert len(finite) >= 4 and min(finite) > 0.1, "the clip never acts: the test shows nothing"
    assert [math.isfinite(row[1]) for row in answer["rows"]] == [math.isfinite(row[1]) for row in one["rows"]]
    tolerance = {"bf16": 2e-2, "fp16": 2e-3}[precision]
    for row, wanted in zip(answer["rows"], one["rows"]):
        assert row[0] == pytest.approx(wanted[0], rel=tolerance)
        if math.isfinite(wanted[1]):
            assert row[1] == pytest.approx(wanted[1], rel=2 * tolerance)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_the_clip_is_the_native_one(run: Any, stage: int) -> None:
    options = {"clip": 0.05}
    (one,) = run(zero_cases.stages, 1, [None], 6, options)[0]
    assert all(row[1] > 0.05 for row in one["rows"])
    answer = run(zero_cases.stages, 2, STAGES, 6, options)[0][stage]
    compare(answer["rows"], one["rows"], first=1e-6, later=1e-4)


def test_ranks_with_an_empty_share_change_nothing(run: Any) -> None:
    one, two = run(zero_cases.empty_shares, 1, STAGES)[0], run(zero_cases.empty_shares, 2, STAGES)
    assert two[0] == two[1]
    for stage in STAGES:
        for row, wanted in zip(two[0][stage], one[stage], strict=True):
            assert row == pytest.approx(wanted, rel=1e-5)


def test_evaluation_sums_unequal_shares_and_changes_nothing(run: Any) -> None:
    answers = run(zero_cases.evaluations, 2, STAGES)
    for stage in STAGES:
        first = answers[0][stage]
        assert answers[1][stage] == first and first["same"] and first["nothing"] == [0.0, 0]
        assert first["together"] == pytest.approx(answers[0][0]["together"], rel=1e-6)
    assert answers[0][0]["together"][1] == 98


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_update_on_all(run: Any, world_size: int) -> None:
    for answer in run(zero_cases.not_finite, world_size, STAGES):
        for stage in answer:
            assert stage["applied"] == [True, False, True]
            assert stage["loss"] in ("inf", "nan")
            assert stage["unchanged"] and stage["as_if"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_what_is_saved_goes_on_to_the_last_bit(run: Any, world_size: int, stage: int) -> None:
    """Into an engine in which everything was NaN; the pieces of all ranks cover each element once (see `assembled`)."""
    for answer in run(zero_cases.saves_and_loads, world_size, [(same, same) for same in STAGES], {}):
        assert answer[stage]["equal"] and answer[stage]["saved_again"]
        assert answer[stage]["resumed"] == answer[stage]["straight"]
        assert {role for _, role, *_ in answer[stage]["pieces"]} == {"parameter", "exp_avg", "exp_avg_sq", "step"}


CHANGES = [(None, 2), (2, None), (3, None), (None, 3), (1, 3), (3, 0)]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_run_changes_engine_and_stage(run: Any, change: tuple[int | None, int | None]) -> None:
    """None is the native engine."""
    for answer in run(zero_cases.saves_and_loads, 2, CHANGES, {}):
        found = answer[CHANGES.index(change)]
        assert found["saved_again"]
        compare(found["resumed"], found["straight"], first=1e-6, later=1e-5)


def test_the_loss_scale_of_fp16_is_in_the_checkpoint(run: Any) -> None:
    for answer in run(zero_cases.saves_and_loads, 2, [(2, 2), (0, 0)], {"precision": "fp16"}):
        assert all(found["equal"] and found["resumed"] == found["straight"] for found in answer)
    first = run(zero_cases.saves_and_loads, 2, [(2, 2), (0, 0)], {"precision": "fp16"})[0]
    assert all(any(name == "loss_scale" for name, *_ in found["pieces"]) for found in first)


@pytest.mark.claim(
    "X4",
    command="fleetune train --offload optimizer|parameters",
    seen="offload changes no number",
)
@pytest.mark.parametrize(
    ("stages", "offload"),
    [pytest.param((1, 2, 3), "optimizer", marks=pytest.mark.long), ((3,), "parameters")],
    ids=["optimizer", "parameters"],
)
def test_offload_changes_no_number(run: Any, stages: tuple[int, ...], offload: str) -> None:
    (one,) = run(zero_cases.stages, 1, [None], 6, {})[0]
    for answer in run(zero_cases.stages, 2, list(stages), 6, {"offload": offload})[0]:
        compare(answer["rows"], one["rows"], first=1e-6, later=1e-5)


def test_accumulation_costs_no_traffic_where_a_rank_holds_whole_gradients(run: Any) -> None:
    whole, optimizer, gradients, parameters = run(zero_cases.traffic, 2, STAGES, [1, 4])[0]
    num_bytes = 4 * sum(parameter.numel() for _, parameter in toy.Toy().trained())
    for one, four in (whole, optimizer):
        assert one == four > num_bytes, "or the collectives of DeepSpeed are not counted"
    assert gradients[1] > gradients[0] and parameters[1] > parameters[0]


def test_communicating_once_sends_gradients_once_and_changes_no_number(run: Any) -> None:
    one, four = run(zero_cases.traffic, 2, [2], [1, 4], "once")[0][0]
    assert one == four
    (native,) = run(zero_cases.stages, 1, [None], 10, {})[0]
    for answer in run(zero_cases.stages, 2, [2, 3], 10, {"accumulate": "once"})[0]:
        compare(answer["rows"], native["rows"], first=1e-6, later=1e-5)


@pytest.mark.parametrize("adapter", ["lora", pytest.param(None, marks=pytest.mark.long)], ids=["lora", "full"])
def test_a_real_model_trains_as_in_one_process(run: Any, tiny_llama: Path, adapter: str | None) -> None:
    """Packed documents, dropout in the adapter, 5 steps; frozen weights are the same bits afterwards."""
    options = {"adapter": adapter}
    (one,) = run(zero_cases.real, 1, str(tiny_llama), [None], options)[0]
    assert one["rows"][-1][0] < one["rows"][0][0]
    for answer in run(zero_cases.real, 2, str(tiny_llama), STAGES, options):
        for stage in answer:
            compare(stage["rows"], one["rows"], first=2e-6, later=1e-4)
            assert stage["held_out"] == pytest.approx(one["held_out"], rel=1e-4)
            assert stage["unchanged"] and stage["frozen"] == one["frozen"]
