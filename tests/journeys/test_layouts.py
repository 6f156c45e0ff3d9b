"""One run over several ranks that keep it in pieces, as a person starts it; and the same run in another layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from journeys.journey import SMALL, fleetune, losses, rows_of, samples, write_rows

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

RUN = ["--micro-batch-size", "1", "--device", "cpu", "--precision", "fp32", *SMALL]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A full fine-tuning of two processes with half of everything each, stopped after 4 steps, with answers to 3 rows."""
    folder = tmp_path_factory.mktemp("sharded")
    write_rows(folder / "rows.jsonl", 24)
    write_rows(folder / "held_out.jsonl", 3, first=100)
    done = fleetune(
        "train", "--model", tiny_llama, "--data", "rows.jsonl", "--validation", "held_out.jsonl", "--run", "run",
        "--method", "full", "--gpus", "2", "--shard", "2", "--max-steps", "4", "--exact-match", "--max-new-tokens", "6",
        *RUN, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_each_rank_holds_half_and_the_plan_said_so(sharded: Path):
    (start,) = [row for row in rows_of(sharded / "run" / "events.jsonl") if "ranks" in row]
    planned = json.loads((sharded / "run" / "plan.json").read_text())
    assert start["layout"] == planned["layout"] == {"replicate": 1, "shard": 2, "tensor": 1, "pipeline": 1}
    assert [row["layout"]["shard"] for row in start["ranks"]] == [0, 1]
    for row in start["ranks"]:
        assert row["parameter_bytes"] == 4 * start["trained_parameters"] / 2 == planned["rank_memory"]["trained_bytes"]
        assert row["optimizer_bytes"] == 8 * start["trained_parameters"] / 2 == planned["rank_memory"]["optimizer_bytes"]


def test_the_model_is_whole_and_answers_were_given(sharded: Path):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sharded / "run" / "model")
    summary = json.loads((sharded / "run" / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"]
    assert summary["after"]["exact_match"] is not None and len(summary["replies"]) == 2
    assert all(bool(torch.isfinite(value).all()) and value.numel() for value in model.state_dict().values())
    assert model.lm_head.weight.shape[0] == model.config.vocab_size


def test_it_goes_on_in_one_process_with_the_same_samples(sharded: Path, tiny_llama: Path):
    words = ["--gpus", "1", "--shard", "1", "--max-steps", "6"]
    done = fleetune("train", "--resume", "--run", "run", *words, cwd=sharded)
    assert done.returncode == 0, done.stderr
    one = fleetune(
        "train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "one", "--method", "full", "--max-steps", "6",
        "--schedule-steps", "4", *RUN, cwd=sharded,
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    assert samples(sharded / "run") == samples(sharded / "one")
    went_on = [float.fromhex(loss) for loss in losses(sharded / "run")]
    assert went_on == pytest.approx([float.fromhex(loss) for loss in losses(sharded / "one")], rel=1e-3)


def test_a_layout_that_does_not_fit_the_model_is_refused_before_anything_is_written(tiny_llama: Path, tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", 4)
    words = ["--gpus", "4", "--tensor", "4", "--run", "run"]
    done = fleetune("train", "--model", tiny_llama, "--data", "rows.jsonl", *words, *RUN, cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "tensor 4 does not divide the model's 4 attention heads and 2 heads of keys and values" in done.stderr
