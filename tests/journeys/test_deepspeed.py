"""DeepSpeed from the command line: a person's JSON as it is, killed and resumed, with DeepSpeed and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed_article import ARTICLE
from journeys.journey import fleetune, kill_everything, losses, rows_of, start, wait_for_step, write_rows

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'fleetune[deepspeed]'")

SMALL = ["--sequence-length", "64", "--global-batch-size", "4", "--learning-rate", "1e-2", "--precision", "fp32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    write_rows(folder / "rows.jsonl", 64)
    (folder / "ds.json").write_text(ARTICLE)
    return folder


@pytest.mark.claim(
    "X25",
    command="fleetune train --use_deepspeed --deepspeed_config ds.json --num_gpus 2",
    seen="stage 2 with the optimizer in host memory: each of two ranks holds half of its state",
)
@pytest.mark.claim(
    "X33",
    command="fleetune train --use_deepspeed --deepspeed_config ds.json --num_gpus 2",
    seen=(
        "the article's JSON as it is: 32 sequences, accumulation 4, AdamW at 5e-5, stage 2 offloaded, fp16 with a dynamic scale"
    ),
)
def test_the_articles_json_trains_as_it_is(place: Path, tiny_llama: Path) -> None:
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", "--sequence-length", "64", "--run", "article"]
    done = fleetune(
        *words, "--use_deepspeed", "--deepspeed_config", "ds.json", "--num_gpus", "2", "--max-steps", "2", cwd=place
    )
    assert done.returncode == 0, done.stderr
    assert "32 sequences = 8 micro-batches of 4, 4 on each of 2 processes" in done.stderr
    assert "zero_stage 2, offload optimizer" in done.stderr
    began = next(row for row in rows_of(place / "article" / "events.jsonl") if "precision" in row)
    assert (began["precision"], began["micro_batch_size"], began["gradient_accumulation_steps"]) == ("fp16", 4, 4)
    assert [row["applied"] for row in rows_of(place / "article" / "ledger.jsonl")] == [True, True]
    # Each rank keeps half of the moments and of the fp32 copy: (8 + 4) / 2 bytes a parameter, and a little padding.
    for rank in began["ranks"]:
        assert 6 <= rank["optimizer_bytes"] / began["trained_parameters"] < 6.2
    assert (place / "article" / "deepspeed.json").read_text() == ARTICLE


@pytest.mark.claim(
    "X33",
    command="fleetune train --deepspeed ds.json --gpus 3",
    seen="numbers that do not multiply, and flags that say another thing, are named with both places",
)
def test_numbers_that_collide_are_named_before_anything_is_written(place: Path, tiny_llama: Path) -> None:
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", "--deepspeed", "ds.json", "--run", "never"]
    three = fleetune(*words, "--gpus", "3", cwd=place)
    assert three.returncode == 2
    assert "global_batch_size 32 does not divide by gradient_accumulation_steps 4 × 3 data ranks = 12" in three.stderr
    size = fleetune(*words, "--gpus", "2", "--micro-batch-size", "2", cwd=place)
    assert size.returncode == 2
    assert "global_batch_size 32 is not micro_batch_size 2 × gradient_accumulation_steps 4 × 2 data ranks = 16" in size.stderr
    other = fleetune(*words, "--gpus", "2", "--learning-rate", "1e-3", "--precision", "fp32", cwd=place)
    assert other.returncode == 2 and "optimizer.params.lr" in other.stderr and "fp16.enabled" in other.stderr
    assert not (place / "never").exists()


@pytest.mark.long
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(place: Path, tiny_llama: Path, method: str, stage: str) -> None:
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", *SMALL, "--max-steps", "12", "--checkpoint-every", "4"]
    words += ["--method", method, "--gpus", "2", "--zero-stage", stage]
    golden, name = f"golden-{method}-{stage}", f"killed-{method}-{stage}"
    done = fleetune(*words, "--run", golden, cwd=place)
    assert done.returncode == 0, done.stderr
    process = start(*words, "--run", name, cwd=place)
    wait_for_step(place / name, 6, process)
    kill_everything(process)
    done = fleetune(*words, "--run", name, "--resume", cwd=place)
    assert done.returncode == 0, done.stderr
    assert losses(place / name) == losses(place / golden)
    verified = fleetune("verify", name, "--against", golden, "--bitwise", cwd=place)
    assert verified.returncode == 0 and "lost 0, repeated 0, losses bitwise" in verified.stdout


@pytest.mark.long
def test_a_run_goes_on_without_deepspeed_and_with_it_again(place: Path, tiny_llama: Path) -> None:
    words = ["train", "--model", tiny_llama, "--data", "rows.jsonl", *SMALL, "--schedule-steps", "9"]
    assert fleetune(*words, "--run", "plain", "--max-steps", "9", cwd=place).returncode == 0
    turns = [
        ("3", ["--zero-stage", "3", "--gpus", "2"]),
        ("6", ["--engine", "native"]),
        ("9", ["--zero-stage", "2", "--gpus", "2"]),
    ]
    for steps, more in turns:
        done = fleetune(*words, "--run", "turns", "--resume", "--max-steps", steps, *more, cwd=place)
        assert done.returncode == 0, done.stderr
    mine, theirs = ([float.fromhex(loss) for loss in losses(place / run)] for run in ("turns", "plain"))
    assert mine == pytest.approx(theirs, rel=1e-4)


def test_what_cannot_be_combined_is_told_with_what_works(place: Path, tiny_llama: Path) -> None:
    words = ["plan", "--model", tiny_llama, "--json"]
    for more, wanted in (
        (["--zero-stage", "2", "--shard", "2", "--gpus", "2"], "DeepSpeed and shard 2"),
        (["--zero-stage", "2", "--offload", "parameters"], "zero_stage 2 and offload parameters"),
        (["--zero-stage", "0", "--offload", "optimizer"], "zero_stage 0 and offload optimizer"),
        (["--engine", "native", "--use_deepspeed"], "engine native and use_deepspeed"),
    ):
        done = fleetune(*words, *more, cwd=place)
        assert done.returncode == 2 and wanted in done.stderr, done.stderr
    plan = fleetune(*words, "--method", "full", "--zero-stage", "3", "--gpus", "2", cwd=place)
    memory = json.loads(plan.stdout)["rank_memory"]
    whole = json.loads(fleetune(*words, "--method", "full", "--gpus", "2", cwd=place).stdout)["rank_memory"]
    assert {name: 2 * size for name, size in memory.items()} == whole
