from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetune.monitor.charts import STEP_CHARTS
from fleetune.monitor.monitor import Monitor
from fleetune.monitor.sinks import make_sinks
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder, read_json, read_lines
from monitor.wandb_file import history, identities

CANARY = "canary-7f3a91c2-of-a-secret"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """A run folder of somebody who is logged in nowhere, with a secret in the environment and on the command line."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    monkeypatch.setenv("HF_TOKEN", f"hf_{CANARY.replace('-', '')}")
    monkeypatch.setattr(sys, "argv", ["train", "--password", CANARY])
    run = RunFolder(tmp_path / "run")
    run.create()
    yield run


def train(folder: RunFolder, asked: list[str], attempt: int, steps: range) -> None:
    config = {"learning_rate": 1e-3, "model": f"https://user:{CANARY}@hub/model", "data": ["a.jsonl"]}
    sinks = make_sinks(folder, asked, first_step=steps.start, config=config)
    with Monitor(folder, attempt=attempt, sinks=sinks) as monitor:
        for step in steps:
            row = {"step": step, "loss": 1.0 / 3 + step + attempt, "learning_rate": 1e-5 * step, "tokens_per_s": 100.0}
            monitor.record({**row, "gradient_norm": None})
            print("api_key =", CANARY)
        monitor.validation(steps[-1], 2.5 + attempt, 12.2)
        monitor.event("save", step=steps[-1], bytes=1000, cause=f"token={CANARY}")


def rows(folder: RunFolder) -> list[dict[str, float]]:
    return [row for row in read_lines(folder.metrics) if "loss" in row]


def leaks(folder: Path) -> list[Path]:
    """Files in which the secret stands, in plain or as part of the hub token."""
    texts = (CANARY.encode(), CANARY.replace("-", "").encode())
    return [path for path in folder.rglob("*") if path.is_file() and any(text in path.read_bytes() for text in texts)]


@pytest.mark.claim(
    "X35",
    command="fleetune train --wandb",
    seen=(
        "without an account it works offline; its file holds the numbers of metrics.jsonl, a resumed run is "
        "the same run, and no secret is in it"
    ),
)
def test_wandb_gets_the_numbers_of_metrics_jsonl_and_a_resumed_run_is_the_same_run(folder: RunFolder) -> None:
    pytest.importorskip("wandb", reason="the extra 'track' is not installed")
    train(folder, ["wandb"], 0, range(1, 5))
    train(folder, ["wandb"], 1, range(4, 8))
    logged = history(folder.path)
    steps = [row for row in logged if "train/loss" in row]
    assert len(steps) == 8
    for row, mine in zip(steps, rows(folder)):
        assert {key: row[key] for key in row if key != "step"} == {
            chart: mine[key] for chart, key in STEP_CHARTS.items() if mine.get(key) is not None
        }
        assert row["step"] == mine["step"]
    assert [row["validation/loss"] for row in logged if "validation/loss" in row] == [2.5, 3.5]
    assert identities(folder.path) == {read_json(folder.path / "trackers.json")["wandb"]}
    assert leaks(folder.path) == []


def test_mlflow_gets_the_numbers_of_metrics_jsonl_and_a_resumed_run_is_the_same_run(folder: RunFolder) -> None:
    pytest.importorskip("mlflow", reason="the extra 'track' is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra 'track' is not installed")
    from mlflow.tracking import MlflowClient

    train(folder, ["mlflow"], 0, range(1, 5))
    train(folder, ["mlflow"], 1, range(5, 8))
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.path / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs(["1"])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in losses] == [(row["step"], row["loss"]) for row in rows(folder)]
    assert run.info.status == "FINISHED" and run.data.params["learning_rate"] == "0.001"
    assert leaks(folder.path) == []


def test_tensorboard_has_the_same_numbers_and_no_secret(folder: RunFolder) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(folder, ["tensorboard"], 0, range(1, 5))
    accumulator = EventAccumulator(str(folder.tensorboard))
    accumulator.Reload()
    for chart, key in STEP_CHARTS.items():
        mine = [(row["step"], row[key]) for row in rows(folder) if row.get(key) is not None]
        if mine:
            seen = [(event.step, event.value) for event in accumulator.Scalars(chart)]
            assert seen == [(step, pytest.approx(value, rel=1e-6)) for step, value in mine]  # kept there in fp32
    assert leaks(folder.path) == []


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("mlflow", "mlflow.tracking")])
def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"--{name} needs .*pip install 'fleetune\[track\]'"):
        make_sinks(RunFolder(tmp_path), [name], first_step=1)


def test_nobody_goes_online_who_is_not_logged_in_or_has_forbidden_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fleetune.monitor.wandb_sink import _mode

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _mode(offline=False) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert _mode(offline=False) == "online" and _mode(offline=True) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert _mode(offline=False) == "disabled"


def test_a_row_of_metrics_is_what_a_reader_of_json_sees(folder: RunFolder) -> None:
    train(folder, [], 0, range(1, 3))
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2, 2]
