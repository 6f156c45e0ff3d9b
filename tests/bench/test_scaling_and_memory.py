"""Scaling and memory: like is compared with like, and the tables say what was measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fleetune.bench.figures import Figures, Step
from fleetune.bench.memory import MemoryReport
from fleetune.bench.memory import Row as MemoryRow
from fleetune.bench.random_model import write_random_model
from fleetune.bench.scaling import Row, ScalingReport
from fleetune.bench.training_run import Asked
from journeys.journey import fleetune, write_rows

ASKED = Asked("tiny", ("rows.jsonl",), "lora", 8, 64, 4, 1, 2, 1)
MACHINE = {"cpu": "a CPU", "cores": 2, "load": 0.0, "versions": {"torch": "2"}}


def figures(seconds: float, *, loss: float = 1.0, own: int = 0, before: int = 0) -> Figures:
    steps = tuple(Step(loss, 100, 50, seconds) for _ in range(4))
    return Figures("fleetune", "", steps, 1.0, 0, own, before, 1_500_000)


def test_speed_up_efficiency_and_loss_parity_are_against_one_process():
    report = ScalingReport(
        ASKED,
        MACHINE,
        (Row(1, None, (figures(1.0),)), Row(2, None, (figures(0.625, loss=1.25),)), Row(2, 1000, (figures(0.8),))),
    )
    one, two, slow = report.to_json()["rows"]
    assert (one["speed_up"], one["efficiency"], one["loss_difference"]) == (1.0, 1.0, 0.0)
    assert (two["speed_up"], two["efficiency"], two["loss_difference"]) == (1.6, 0.8, 0.25)
    assert (slow["link_mbit"], slow["speed_up"]) == (1000, 1.25)
    assert report.lines()[-1].startswith("| 2 | 1000 Mbit/s | 125 (125 to 125) |") and "1.5 |" in report.lines()[-1]


def test_what_a_method_saves_is_above_what_the_process_had_before_it_loaded():
    rows = [("full", 5_000), ("lora", 1_250), ("qlora", 1_100)]
    report = MemoryReport(
        ASKED, MACHINE, tuple(MemoryRow(name, True, (figures(1.0, own=own, before=1_000),)) for name, own in rows)
    )
    assert [row["rank_bytes_above_baseline"] for row in report.to_json()["rows"]] == [4_000, 250, 100]
    assert [row["saving"] for row in report.to_json()["rows"]] == [0.0, 1 - 250 / 4_000, 1 - 100 / 4_000]


def test_a_method_that_does_not_fit_is_a_row_that_says_so():
    rows = MemoryRow("full", True, (), "out of memory"), MemoryRow("lora", True, (figures(1.0, own=5, before=1),))
    report = MemoryReport(ASKED, MACHINE, rows)
    assert [row["failure"] for row in report.to_json()["rows"]] == ["out of memory", None]
    assert [row["saving"] for row in report.to_json()["rows"]] == [None, None]
    assert "did not run: out of memory" in report.lines()[-2]


def test_a_model_of_random_weights_has_the_asked_size_and_transformers_loads_it(tmp_path: Path, tiny_llama: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_random_model(str(tiny_llama), 8_000_000, tmp_path / "random")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert 0.9 < model.num_parameters() / 8_000_000 < 1.1
    assert AutoTokenizer.from_pretrained(folder)("How many?")["input_ids"]


@pytest.mark.claim(
    "X43",
    command="fleetune bench scaling",
    seen="the same run on 1 and 2 processes: speed-up, efficiency, memory and loss parity",
)
@pytest.mark.claim(
    "H38",
    command="fleetune bench scaling",
    seen=(
        "the article's table, measured: tokens/s, memory of a device, loss parity, speed-up and efficiency "
        "for every number of processes"
    ),
)
@pytest.mark.claim(
    "H37",
    command="fleetune bench scaling",
    seen=(
        "the article's table, measured: tokens/s, memory of a device, loss parity, speed-up and efficiency "
        "for every number of processes"
    ),
)
@pytest.mark.claim(
    "H36",
    command="fleetune bench scaling",
    seen=(
        "the article's table, measured: tokens/s, memory of a device, loss parity, speed-up and efficiency "
        "for every number of processes"
    ),
)
@pytest.mark.long
def test_scaling_prints_the_articles_table(tmp_path: Path, tiny_llama: Path):
    write_rows(tmp_path / "rows.jsonl", 64)
    done = fleetune(
        "bench", "scaling", "--model", tiny_llama, "--data", "rows.jsonl", "--gpus", "2", "--threads", "1", "--steps", "4",
        "--rounds", "1", "--sequence-length", "64", "--precision", "fp32", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["bytes_sent_per_step"] == 0 < two["bytes_sent_per_step"]
    assert two["loss_difference"] < 1e-5 and two["memory_per_device"] > 50_000_000


def can_make_namespaces() -> bool:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    made = subprocess.run(["ip", "netns", "add", "fleetune-try"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "delete", "fleetune-try"], capture_output=True, check=False)
    return made


@pytest.mark.long
@pytest.mark.skipif(not can_make_namespaces(), reason="a slow link needs root, ip and tc")
def test_a_slow_link_is_one(tmp_path: Path, tiny_llama: Path):
    write_rows(tmp_path / "rows.jsonl", 64)
    done = fleetune(
        "bench", "scaling", "--model", tiny_llama, "--data", "rows.jsonl", "--gpus", "2", "--threads", "1", "--steps", "4",
        "--rounds", "1", "--sequence-length", "64", "--precision", "fp32", "--link-mbit", "1", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, fast, slow = json.loads(done.stdout)["rows"]
    assert slow["bytes_sent_per_step"] == fast["bytes_sent_per_step"] and slow["loss_difference"] < 1e-5
    # What a step sends takes this long on such a link, less what may leave at once.
    seconds = 8 * (slow["bytes_sent_per_step"] - 16_000) / 1e6
    assert min(step["seconds"] for step in slow["runs"][0]["steps"][2:]) > 0.8 * seconds


@pytest.mark.claim(
    "H22",
    command="fleetune bench memory",
    seen="a measured table of full, lora and qlora, with and without gradient checkpointing, and what each saves",
)
@pytest.mark.long
def test_memory_compares_the_methods(tmp_path: Path, tiny_llama: Path):
    write_rows(tmp_path / "rows.jsonl", 64)
    done = fleetune(
        "bench", "memory", "--model", tiny_llama, "--data", "rows.jsonl", "--threads", "1", "--steps", "4",
        "--sequence-length", "64", "--random-parameters", "30000000", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {(row["method"], row["gradient_checkpointing"]): row for row in json.loads(done.stdout)["rows"]}
    assert len(rows) == 6 and rows["lora", True]["saving"] > 0.5
    assert rows["full", True]["rank_bytes_above_baseline"] > 16 * 25_000_000


def test_what_a_measurement_does_not_measure_is_refused(tmp_path: Path):
    done = fleetune("bench", "memory", "--model", "x", "--data", "y", "--link-mbit", "10", cwd=tmp_path)
    assert done.returncode == 2 and "--link-mbit belongs to `fleetune bench scaling`" in done.stderr
