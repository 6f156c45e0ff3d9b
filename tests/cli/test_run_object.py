"""The Python functions: the same words and the same errors as the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fleetune
from fleetune.spec.errors import UserError
from journeys.journey import write_rows

#: A secret of the person's environment that must be nowhere in a run folder.
CANARY = "hf_canaryCANARYcanaryCANARY"


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_llama) -> Iterator[fleetune.Run]:
    folder = tmp_path_factory.mktemp("python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", CANARY)
        patch.setenv("WANDB_API_KEY", CANARY)
        yield trained(folder, tiny_llama)


def trained(folder: Path, tiny_llama: Path) -> fleetune.Run:
    return fleetune.train(
        model=tiny_llama,
        data=write_rows(folder / "rows.jsonl", 16),
        validation=[write_rows(folder / "held_out.jsonl", 4, first=100)],
        run=folder / "run",
        max_steps=2,
        global_batch_size=2,
        sequence_length=64,
        precision="fp32",
        device="cpu",
        threads=1,
        log_level="warning",
    )


def test_importing_fleetune_costs_nothing():
    script = (
        "import sys, fleetune\nassert set(fleetune.__all__) <= set(dir(fleetune))\n"
        "print(sorted(set(sys.modules) & {'torch', 'pydantic', 'click', 'yaml', 'fleetune.spec', 'fleetune.cli'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_training_gives_a_run_with_its_folder_and_summary(run):
    assert (run.folder / "adapter" / "adapter_config.json").exists()
    assert run.summary["steps"] == 2 and run.summary["after"]["rows"] == 4
    assert repr(run) == f"Run({str(run.folder)!r})"


def test_the_planned_bytes_are_those_that_the_rank_measured(run):
    planned = json.loads((run.folder / "plan.json").read_text())["rank_memory"]
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    (start,) = [row for row in events if "parameter_bytes" in row][:1]
    assert start["parameter_bytes"] == planned["frozen_bytes"] + planned["trained_bytes"]
    assert start["optimizer_bytes"] == planned["optimizer_bytes"]


def test_a_secret_of_the_environment_is_in_no_file_of_the_run_and_nobody_else_reads_it(run):
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert run.folder.stat().st_mode & 0o077 == 0
    assert (run.folder / "run.yaml").stat().st_mode & 0o077 == 0


def test_evaluating_says_what_the_summary_says(run):
    found = run.evaluate(run.folder.parent / "held_out.jsonl")
    assert found["loss"] == pytest.approx(run.summary["after"]["loss"], rel=1e-5)
    assert found["rows"] == 4 and found["exact_match"] is None
    first = run.evaluate(data=[run.folder.parent / "held_out.jsonl"], max_rows=1, exact_match=True, max_new_tokens=3)
    assert first["rows"] == 1 and first["exact_match"] == 0.0


def test_generating_takes_a_prompt_or_a_conversation(run):
    turns = [{"role": "user", "content": "How many?"}]
    reply = run.generate("How many?", max_new_tokens=4)
    assert reply == run.generate(turns, max_new_tokens=4)
    assert len(turns) == 1, "the caller's list is not changed"
    drawn = {run.generate("How many?", max_new_tokens=8, temperature=5.0, seed=seed) for seed in range(4)}
    assert len(drawn) > 1


def test_exporting_writes_a_checked_model(run):
    report = run.export("merged", out=run.folder.parent / "merged")
    assert (run.folder.parent / "merged" / "model.safetensors").exists()
    assert 0 <= report.divergence <= report.tolerance


def test_going_on_with_the_same_run(run, tiny_llama):
    again = fleetune.train(run=run.folder, resume=True, max_steps=3, log_level="warning")
    assert again.folder == run.folder and again.summary["steps"] == 3


def test_errors_are_exceptions_with_all_problems(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        fleetune.train(model=tiny_llama, data="gone.jsonl", micro_batch_size=3)
    assert len(error.value.problems) == 2
    with pytest.raises(UserError, match="there is no argument learnin_rate: did you mean learning_rate"):
        fleetune.train(model=tiny_llama, data="gone.jsonl", learnin_rate=1)
    with pytest.raises(UserError, match="no run folder"):
        fleetune.Run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_the_preparation_refuses_is_an_exception_too(tiny_llama, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "a " * 200, "answer": "b"}) + "\n")
    with pytest.raises(UserError, match="longer than sequence_length 16") as error:
        fleetune.train(model=tiny_llama, data=path, sequence_length=16, run=tmp_path / "run", device="cpu")
    assert not any(problem.startswith("error") for problem in error.value.problems)
    assert not (tmp_path / "run" / "run.yaml").exists()


def test_planning_gives_a_plan(tiny_llama):
    plan = fleetune.plan(model=tiny_llama, method="full", gpus=2, max_steps=5, device="cpu")
    assert plan.trainable_parameters == plan.num_parameters == 80_112 and plan.num_steps == 5


def test_a_run_file_is_read_in_python_too(tiny_llama, tmp_path):
    path = Path(tmp_path / "run.yaml")
    path.write_text(f"model: {tiny_llama}\nmax_steps: 9\n")
    assert fleetune.plan(file=path).num_steps == 9
    assert fleetune.plan(file=path, max_steps=4).num_steps == 4
