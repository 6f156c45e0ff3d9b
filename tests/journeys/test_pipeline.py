"""A model in stages, as a person runs it: killed, resumed, in other layouts, with answers and a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from journeys.journey import SMALL, fleetune, kill_everything, losses, rows_of, samples, start, wait_for_step, write_rows

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

WORDS = [*SMALL, "--epochs", "2", "--checkpoint-every", "4", "--lora-dropout", "0.1", "--micro-batch-size", "1",
         "--precision", "fp32"]  # fmt: skip


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with a finished run of two stages, with held-out rows and answers."""
    folder = tmp_path_factory.mktemp("stages")
    write_rows(folder / "rows.jsonl")
    write_rows(folder / "held_out.jsonl", 5, first=100)
    held_out = ["--validation", "held_out.jsonl", "--exact-match", "--max-new-tokens", "6"]
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", *WORDS, "--gpus", "2", "--pipeline", "2"]
    done = fleetune(*words, *held_out, "--run", "two", cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def test_each_rank_says_what_its_stage_holds(stages: Path, tiny_llama: Path):
    (begun,) = [row for row in rows_of(stages / "two" / "events.jsonl") if row["event"] == "start" and "ranks" in row]
    assert begun["layout"] == {"replicate": 1, "shard": 1, "tensor": 1, "pipeline": 2} and begun["shares"] == [4]
    whole = (tiny_llama / "model.safetensors").stat().st_size
    assert [row["layout"]["pipeline"] for row in begun["ranks"]] == [0, 1]
    assert all(row["parameter_bytes"] < 0.6 * whole for row in begun["ranks"])
    summary = json.loads((stages / "two" / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"] - 0.3 and summary["after"]["exact_match"] is not None
    report = fleetune("evaluate", "two", "--data", "held_out.jsonl", "--sequence-length", "64", "--json", cwd=stages)
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["loss"] == pytest.approx(summary["after"]["loss"], rel=1e-5)


def test_killed_in_a_pipeline_and_resumed_is_bitwise_the_uninterrupted_run(stages: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", *WORDS, "--gpus", "2", "--pipeline", "2"]
    process = start(*words, "--run", "killed", cwd=stages)
    wait_for_step(stages / "killed", 6, process, timeout=400)
    kill_everything(process)
    done = fleetune(*words, "--run", "killed", "--resume", cwd=stages, timeout=600)
    assert done.returncode == 0, done.stderr
    assert losses(stages / "killed") == losses(stages / "two")
    verified = fleetune("verify", "killed", "--against", "two", "--bitwise", cwd=stages)
    assert verified.returncode == 0 and "lost 0, repeated 0, losses bitwise" in verified.stdout, verified.stdout


@pytest.mark.long
def test_a_run_goes_on_without_its_pipeline_and_back(stages: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", *WORDS, "--run", "moved"]
    for layout in (["--gpus", "2", "--pipeline", "2"], ["--gpus", "1"]):
        process = start(*words, *layout, "--resume", cwd=stages)
        done_before = len(samples(stages / "moved")) if (stages / "moved" / "ledger.jsonl").exists() else 0
        wait_for_step(stages / "moved", done_before + 6, process, timeout=400)
        kill_everything(process)
    done = fleetune(*words, "--gpus", "2", "--pipeline", "2", "--resume", cwd=stages, timeout=600)
    assert done.returncode == 0, done.stderr
    assert samples(stages / "moved") == samples(stages / "two")
    mine, theirs = ([float.fromhex(loss) for loss in losses(stages / run)] for run in ("moved", "two"))
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_more_stages_than_blocks_end_with_exit_2_before_anything_is_written(tmp_path: Path, tiny_llama: Path):
    done = fleetune(
        "train", "--model", tiny_llama, "--data", write_rows(tmp_path / "rows.jsonl"), "--gpus", "3", "--pipeline", "3",
        "--run", "run", *SMALL, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and "pipeline 3 makes 3 runs of blocks, and the model has 2 blocks" in done.stderr
    assert not (tmp_path / "run").exists()
