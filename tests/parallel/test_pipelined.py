"""Stages of a model on several ranks train as one process does, and go on from each other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from fleetune.parallel.pipe import Wire, padded_count
from parallel import pipeline_cases as cases
from parallel.ranks import Ranks

NUM_STEPS = 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of four blocks: untied, tied with learned positions, tied with scaled embeddings, rows of documents and alibi."""
    root = tmp_path_factory.mktemp("stages")
    sizes = {"gpt2": {"n_layer": 4}, "bloom": {"n_layer": 4, "num_hidden_layers": 4}}
    families = ("llama", "gpt2", "gemma", "bloom")
    return {name: str(tiny.write_model(root / name, name, **sizes.get(name, {"num_hidden_layers": 4}))) for name in families}


def compare(
    ranks: Ranks, folder: str, axes: dict[str, int], schedule: str, jobs: list[tuple[str, dict[str, Any]]]
) -> list[list[dict[str, Any]]]:
    """Train each job in one process and in the layout; returns what the ranks of the layout say of each."""
    size = 1
    for number in axes.values():
        size *= number
    alone = ranks.run(cases.losses, 1, folder, {}, "1f1b", jobs, NUM_STEPS)[0]
    together = ranks.run(cases.losses, size, folder, axes, schedule, jobs, NUM_STEPS)
    for job, (one, *many) in enumerate(zip(alone, *together)):
        check(jobs[job][0], one, many, pipeline=axes["pipeline"])
    return [list(answers) for answers in zip(*together)]


def check(method: str, one: dict[str, Any], many: list[dict[str, Any]], pipeline: int) -> None:
    assert len({answer["fingerprint"] for answer in many}) == 1, "the ranks tell different weights"
    for answer in many:
        assert answer["rows"] == many[0]["rows"], "the ranks decide differently"
        assert answer["names"] == one["names"], "the model's order is lost"
        assert answer["copies_equal"], "what several stages hold has drifted apart"
        assert answer["frozen_unchanged"] and answer["whole"][1]
    for step, (row, expected) in enumerate(zip(many[0]["rows"], one["rows"])):
        assert row[0] == pytest.approx(expected[0], rel=1e-6 if step == 0 else 1e-4)
        assert row[1] == pytest.approx(expected[1], rel=1e-5 if step == 0 else 1e-4)
        assert row[2:] == expected[2:]
    assert one["rows"][0][1] > 0.2, "the clip never acts: the test shows nothing"
    for when in ("before", "after"):
        assert many[0][when][1] > 0
    assert many[0]["before"] == pytest.approx(one["before"], rel=1e-5)
    assert all(answer["held"][2] == one["held"][2] for answer in many), "the model's trained parameters are counted"
    assert all(answer["held"][0] < 0.8 * one["held"][0] for answer in many), f"a rank of {pipeline} holds too much"
    first = [answer["whole"][0] for answer in many]
    assert first == [rank < len(many) // pipeline for rank in range(len(many))], "the first stage replies"


@pytest.mark.claim(
    "X1",
    command="fleetune train --pipeline 2",
    seen="two stages of blocks train as one process, each with its own blocks only",
)
def test_two_stages_train_as_one_process(ranks: Ranks, folders: dict[str, str]) -> None:
    jobs = [("full", {}), ("lora", {"dropout": 0.2}), ("full", {"gradient_checkpointing": True})]
    full, lora, _ = compare(ranks, folders["llama"], {"pipeline": 2}, "1f1b", jobs)
    assert not set(full[0]["here"]) & set(full[1]["here"]) - {"model.norm.weight"}
    assert all(".layers.0." in name or ".layers.1." in name for name in lora[0]["here"])


def test_interleaved_runs_with_a_tied_head_train_as_one_process(ranks: Ranks, folders: dict[str, str]) -> None:
    full, _ = compare(ranks, folders["gpt2"], {"pipeline": 2}, "interleaved", [("full", {}), ("lora", {})])
    assert all("transformer.wte.weight" in answer["here"] for answer in full), "the embedding is the head: both hold it"


@pytest.mark.claim(
    "X3",
    command="fleetune train --replicate 2 --pipeline 2",
    seen="a grid of stages and copies trains as one process",
)
def test_stages_and_copies_train_as_one_process(ranks: Ranks, folders: dict[str, str]) -> None:
    """Five micro-batches that train something on two data ranks: unequal shares, filled up differently."""
    compare(ranks, folders["gemma"], {"pipeline": 2, "replicate": 2}, "1f1b", [("full", {})])


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "axes", "schedule"),
    [
        ("bloom", {"pipeline": 4}, "1f1b"),
        ("llama", {"pipeline": 2, "replicate": 2}, "interleaved"),
        ("gemma", {"pipeline": 2, "replicate": 2}, "interleaved"),
        ("gpt2", {"pipeline": 4}, "1f1b"),
    ],
)
def test_other_layouts_and_methods_train_as_one_process(
    ranks: Ranks, folders: dict[str, str], family: str, axes: dict[str, int], schedule: str
) -> None:
    jobs: list[tuple[str, dict[str, Any]]] = [("full", {}), ("lora", {"dropout": 0.1}), ("dora", {}), ("rslora", {})]
    compare(ranks, folders[family], axes, schedule, jobs)


ONE: tuple[dict[str, int], str] = ({}, "1f1b")
TWO: tuple[dict[str, int], str] = ({"pipeline": 2}, "1f1b")
LOOPED: tuple[dict[str, int], str] = ({"pipeline": 2}, "interleaved")
COPIES: tuple[dict[str, int], str] = ({"replicate": 2}, "1f1b")


@pytest.mark.parametrize(("saves", "loads"), [(TWO, TWO), (TWO, ONE), (COPIES, LOOPED)])
def test_a_checkpoint_of_one_layout_goes_on_in_another(
    ranks: Ranks, folders: dict[str, str], tmp_path: Path, saves: Any, loads: Any
) -> None:
    answers = ranks.run(cases.resumed, 2, folders["llama"], str(tmp_path / "checkpoints"), saves, loads)
    for answer in answers:
        if not answer:
            continue
        assert all(row[0] == row[0] for row in answer["rows"]), "something was not restored"
        if saves == loads:
            assert answer["rows"] == answer["straight"]
            assert answer["fingerprint"] == answer["straight_fingerprint"]
        for row, expected in zip(answer["rows"], answer["straight"]):
            assert row == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_not_finite_in_the_last_stage_changes_no_stage(ranks: Ranks, folders: dict[str, str]) -> None:
    for answer in ranks.run(cases.not_finite, 2, folders["llama"]):
        assert answer == {"applied": [True, False, True], "unchanged": True, "as_if_it_had_not_been": True}


def test_all_stages_scale_an_fp16_loss_alike(ranks: Ranks, folders: dict[str, str]) -> None:
    one = ranks.run(cases.half, 1, folders["llama"], 12)[0]
    two = ranks.run(cases.half, 2, folders["llama"], 12)
    assert two[0] == two[1]
    assert [row[0] for row in two[0]] == [row[0] for row in one]
    assert [row[3] for row in two[0]] == [1.0 - row[0] for row in two[0]], "a scale that was too large is told as that"
    assert 0.0 in [row[0] for row in one] and one[-1][0] == 1.0, "the scale never came down: the test shows nothing"
    for row, expected in zip(two[0], one):
        assert row == pytest.approx(expected, rel=2e-2)


def test_a_step_without_targets_and_a_stage_without_work_are_refused(ranks: Ranks, folders: dict[str, str]) -> None:
    for told in ranks.run(cases.refusals, 2, folders["llama"]):
        assert "no token of this step is trained" in told["nothing trained"] and "rows:0.2.0" in told["nothing trained"]
        assert told["idle stage"].startswith("nothing is trained in stage 2 of 2, so it would only pass hidden states on: give")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_torchs_schedules_take_the_padded_numbers(schedule: str) -> None:
    """The rule is torch's own; a smaller number would do neither."""
    for num_ranks in range(2, 6):
        for count in range(1, 20):
            padded = padded_count(count, num_ranks, schedule)
            assert padded >= count and padded >= num_ranks
            if schedule == "interleaved":
                assert padded % max(1, padded // num_ranks) == 0
                assert padded < count + num_ranks or count < num_ranks


def test_what_does_not_fit_between_stages_is_an_error_not_a_cut() -> None:
    wire = Wire(4, 3, torch.float32)
    assert wire.pad(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2
    for states in (torch.ones(5, 3), torch.ones(2, 2), torch.ones(2, 3, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match="do not fit what travels between stages"):
            wire.pad(states)
