"""Several runs at the same time: one table, failures apart, and going on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from journeys.journey import fleetune, write_rows

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

COMMON = "common: {data: rows.jsonl, validation_share: 0.2, sequence_length: 64, global_batch_size: 4, max_steps: 3}\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    write_rows(folder / "rows.jsonl", 20)
    (folder / "model").symlink_to(tiny_llama)
    return folder


def write(place: Path, text: str, name: str = "sweep.yaml") -> str:
    (place / name).write_text(COMMON + text)
    return name


@pytest.mark.claim(
    "X49",
    command="fleetune compare SWEEP.yaml",
    seen="two settings at the same time, a third that fails beside them; one table, ordered by held-out loss; gone on with",
)
@pytest.mark.claim(
    "X21",
    command="fleetune compare SWEEP.yaml",
    seen="several runs at the same time, each with its share of the devices",
)
def test_a_failed_run_does_not_stop_the_rest_and_the_same_command_goes_on(place):
    # A loss that is not finite is found only while it trains.
    name = write(
        place,
        "at_once: 2\nruns:\n  slow: {model: model, learning_rate: 1e-4}\n  fast: {model: model, learning_rate: 2e-2}\n"
        "  wild: {model: model, learning_rate: 1e30, on_bad: none}\n".replace(", on_bad: none", ""),
    )
    done = fleetune("compare", name, "--json", cwd=place)
    rows = {row["run"]: row for row in json.loads(done.stdout)}
    assert [row["run"] for row in json.loads(done.stdout)][:2] == ["fast", "slow"], done.stderr
    assert rows["fast"]["state"] == rows["slow"]["state"] == "done"
    assert rows["fast"]["loss_after"] < rows["slow"]["loss_after"] <= rows["slow"]["loss_before"]
    begun = [line for line in done.stderr.splitlines() if line.startswith(("fast", "slow"))]
    assert [line.split()[1] for line in begun[:2]] == ["begins", "begins"], "both at the same time"
    again = fleetune("compare", name, cwd=place)
    assert "runs are done already" in again.stderr and "fast begins" not in again.stderr
    assert again.stdout.splitlines()[0].startswith("run ") and again.stdout.splitlines()[1].startswith("fast")


@pytest.mark.claim(
    "X43",
    command="fleetune compare SWEEP.yaml with grid: {gpus: [1, 2]}",
    seen=("runs of 1 and 2 processes, one after the other: tokens/s, memory and loss of each in one table, with the same loss"),
)
def test_a_sweep_over_the_number_of_processes_is_one_table_of_speed_memory_and_loss(place):
    name = write(place, "at_once: 1\nruns: {scale: {model: model, precision: fp32}}\ngrid: {gpus: [1, 2]}\n", "scale.yaml")
    done = fleetune("compare", name, "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    one, two = (next(row for row in json.loads(done.stdout) if row["run"].endswith(f"gpus-{gpus}")) for gpus in (1, 2))
    assert two["loss_after"] == pytest.approx(one["loss_after"], rel=1e-4)
    assert min(one["tokens_per_s"], two["tokens_per_s"]) > 0 and min(one["peak_memory_bytes"], two["peak_memory_bytes"]) > 0
    plans = [json.loads((Path(row["folder"]) / "plan.json").read_text()) for row in (one, two)]
    assert [plan["data_ranks"] for plan in plans] == [1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("runs: {}\n", "names no runs"),
        ("rnus: {a: {}}\n", "did you mean runs?"),
        ("learning_rate: 1\n", "write it under `common:`"),
        ("runs: {a: {model: model, learning_rat: 1}}\n", "run a: there is no setting learning_rat"),
        ("runs: {a: {model: nowhere}, b: {model: model, epochs: x}}\n", "run b: epochs 'x'"),
        ("at_once: 0\nruns: {a: {model: model}}\n", "at_once 0"),
        ("runs: {'a b': {model: model}}\n", "needs a plain name"),
        ("grid: [1]\n", "as `name: value` lines"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_anything_starts(text, says, place):
    name = write(place, text, "wrong.yaml")
    done = fleetune("compare", name, cwd=place)
    assert done.returncode == 2 and says in done.stderr
    assert not (place / "runs" / "wrong").exists()
