"""An adapter on a quantised base, from the command to its export: trained, killed, resumed, read, answered, merged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from journeys.journey import SMALL, fleetune, kill_everything, losses, rows_of, start, wait_for_step, write_rows

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

WORDS = ["--data", "rows.jsonl", "--validation", "held.jsonl", *SMALL, "--epochs", "2", "--micro-batch-size", "1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    write_rows(folder / "rows.jsonl")
    write_rows(folder / "held.jsonl", 8, first=48)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}


@pytest.mark.claim(
    "X24",
    command="fleetune train --method qlora; fleetune train --quantize int8",
    seen="the adapter learns, the base is never written, the memory saved is told; resumed, evaluated, exported",
)
@pytest.mark.parametrize("words", [["--method", "qlora"], ["--quantize", "int8", "--adapter", "dora"]])
def test_from_the_first_step_to_the_merged_model(place: Path, tiny_llama: Path, words: list[str]):
    run = place / words[1]
    train = ["train", "--model", tiny_llama, *WORDS, *words, "--run", run, "--checkpoint-every", "5"]
    process = start(*train, cwd=place)
    wait_for_step(run, 7, process)
    base = Path(json.loads((run / "prepared.json").read_text())["quantized_folder"])
    before = hashes(base)
    kill_everything(process)
    done = fleetune(*train, "--resume", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "base (" in done.stderr + done.stdout
    golden = place / f"{words[1]}-golden"
    assert fleetune(*train[:-4], "--run", golden, cwd=place).returncode == 0
    assert losses(run) == losses(golden), "resumed bitwise"
    assert hashes(base) == before and len(before) == 2, "the base was never written"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"] - 0.5
    started = next(row for row in rows_of(run / "events.jsonl") if row["event"] == "start" and "layout" in row)
    planned = json.loads((run / "plan.json").read_text())
    assert started["quantize"] == planned["quantize"] == summary["base"]["quantize"]
    for checkpoint in (run / "checkpoints").iterdir():
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
        assert size < 4 * 3 * planned["trainable_parameters"] + 96_000, "a checkpoint holds the adapter and its optimizer only"
    again = fleetune("evaluate", run, "--data", "held.jsonl", "--sequence-length", "64", "--json", cwd=place)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["loss"] == pytest.approx(summary["after"]["loss"], rel=1e-5)
    reply = fleetune("generate", run, "How many clips are 3 and 3?", "--max-new-tokens", "4", cwd=place)
    assert reply.returncode == 0, reply.stderr
    for to in ("adapter", "merged"):
        exported = fleetune("export", run, "--to", to, "--json", cwd=place)
        assert exported.returncode == 0, exported.stderr
        report = json.loads(exported.stdout)
        assert report["divergence"] <= report["tolerance"]
    merged = fleetune(
        "evaluate", run / "export" / "merged", "--data", "held.jsonl", "--sequence-length", "64", "--json", cwd=place
    )
    assert json.loads(merged.stdout)["loss"] == pytest.approx(summary["after"]["loss"], abs=0.02)


@pytest.mark.claim(
    "X24",
    command="fleetune train --method qlora --gpus 2",
    seen="two processes have the losses of one, and only adapters travel",
)
def test_two_processes_give_the_losses_of_one_and_send_only_adapters(place: Path, tiny_llama: Path):
    runs = {}
    for gpus in (1, 2):
        run = place / f"ranks-{gpus}"
        done = fleetune("train", "--model", tiny_llama, *WORDS, "--method", "qlora", "--gpus", str(gpus), "--max-steps", "6",
                        "--precision", "fp32", "--run", run, cwd=place)  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs[gpus] = [float.fromhex(loss) for loss in losses(run)]
    assert runs[2] == pytest.approx(runs[1], rel=1e-5)
    planned = json.loads((place / "ranks-2" / "plan.json").read_text())
    row = next(row for row in rows_of(place / "ranks-2" / "metrics.jsonl") if row.get("step") == 3 and "loss" in row)
    assert 4 * planned["trainable_parameters"] <= row["bytes_sent"] < 2 * 4 * planned["trainable_parameters"] + 64_000


def test_another_quantisation_on_resume_is_refused(place: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, *WORDS, "--max-steps", "2", "--run", place / "changed"]
    assert fleetune(*words, "--quantize", "int8", cwd=place).returncode == 0
    refused = fleetune(*words, "--quantize", "nf4", "--resume", cwd=place)
    assert refused.returncode == 2 and "quantize was int8" in refused.stderr
