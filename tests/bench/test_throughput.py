"""The measurements run, count what they say they count, and compare like with like."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from fleetune.bench.figures import Figures, Spread, Step
from fleetune.bench.matmul_limit import flops_per_token, products_of, seconds_per_token
from fleetune.bench.process_tree import run_watched
from fleetune.bench.throughput import steps_of
from journeys.journey import fleetune, write_rows


def test_the_memory_of_a_whole_tree_is_seen(tmp_path: Path):
    child = "held = bytearray(80_000_000); import time; time.sleep(1)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    watched = run_watched([sys.executable, "-c", code], log=tmp_path / "log", environment={})
    assert watched.exit_code == 0
    assert 80_000_000 < watched.peak_bytes < 160_000_000


def test_speed_leaves_out_the_first_steps_and_counts_what_lies_between():
    rows = [{"loss": 1.0, "tokens": 100, "trained_tokens": 50, "time": time} for time in (20.0, 30.0, 31.0, 33.0)]
    figures = Figures("fleetune", "", steps_of(rows, 0.0), 20.0, 0)
    assert [step.seconds for step in figures.steps] == [20.0, 10.0, 1.0, 2.0]
    assert figures.tokens_per_s == pytest.approx(200 / 3) and figures.trained_tokens_per_s == pytest.approx(100 / 3)
    assert figures.steps[0] == Step(1.0, 100, 50, 20.0)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_the_limit_counts_the_products_of_the_models_own_linears(tiny_llama: Path):
    config = json.loads((tiny_llama / "config.json").read_text())
    hidden, width, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    keys = config["num_key_value_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    queries = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    weights = layers * (2 * hidden * queries + 2 * hidden * keys + 3 * hidden * width)
    head = hidden * config["vocab_size"]
    lora = products_of(tiny_llama, method="lora", trained_share=0.5)
    assert flops_per_token(lora) == 4 * (weights + 0.5 * head)
    assert flops_per_token(products_of(tiny_llama, method="full", trained_share=0.5)) == 6 * (weights + 0.5 * head)
    assert 0 < seconds_per_token(lora[:1], precision="fp32") < 1


@pytest.mark.long
def test_the_command_prints_every_figure(tmp_path: Path, tiny_llama: Path):
    write_rows(tmp_path / "rows.jsonl", 64)
    done = fleetune(
        "bench", "throughput", "--model", tiny_llama, "--data", "rows.jsonl", "--against", "nothing", "--steps", "4",
        "--rounds", "1", "--sequence-length", "64", "--threads", "1", "--precision", "fp32", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ratio"]["tokens_per_s"] is None
    (run,) = report["runs"]
    assert len(run["losses"]) == 4 and run["tokens_per_s"] > 0 and run["peak_memory_bytes"] > 100_000_000
    assert report["share_of_matmul_limit"] == pytest.approx(run["tokens_per_s"] / report["matmul_limit"]["tokens_per_s"])


def test_a_measurement_that_does_not_exist_is_refused(tmp_path: Path):
    done = fleetune("bench", "speed", "--model", "x", "--data", "y", cwd=tmp_path)
    assert done.returncode == 2 and "give throughput, scaling, memory" in done.stderr


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed: fleetune[bench]")
def test_trl_trains_the_same_tokens_and_begins_at_the_same_loss(tmp_path: Path, tiny_llama: Path):
    write_rows(tmp_path / "rows.jsonl", 64)
    done = fleetune(
        "bench", "throughput", "--model", tiny_llama, "--data", "rows.jsonl", "--steps", "4", "--rounds", "1",
        "--sequence-length", "64", "--threads", "1", "--precision", "fp32", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {run["program"] for run in report["runs"]} == {"fleetune", "trl"}
    first = {(run["program"], run["settings"]): run["losses"][0] for run in report["runs"]}
    ours = next(loss for (program, _), loss in first.items() if program == "fleetune")
    # random weights say the same of any row, near enough: a mask or a scale that differs would show
    assert all(loss == pytest.approx(ours, rel=0.02) for loss in first.values()), first
    assert report["ratio"]["tokens_per_s"] > 0 and report["ratio"]["peak_memory"] > 0
