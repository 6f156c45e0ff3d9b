from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleetune.monitor.monitor import Monitor
from fleetune.monitor.sinks import make_sinks
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder


def charts(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars(tag)]


def train(folder: RunFolder, attempt: int, steps: range, loss: float) -> None:
    sinks = make_sinks(folder, ["tensorboard"], first_step=steps.start)
    with Monitor(folder, attempt=attempt, sinks=sinks) as monitor:
        for step in steps:
            monitor.record({"step": step, "loss": loss + step, "tokens_per_s": 100.0, "gradient_norm": None})
        monitor.validation(steps[-1], loss, 2.0)
        monitor.event("save", step=steps[-1], bytes=1000)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    pytest.importorskip("tensorboard", reason="the extra 'track' is not installed")
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


@pytest.mark.claim(
    "X34",
    command="fleetune train --tensorboard",
    seen="TensorBoard's own reader finds each step once, over a resume too",
)
def test_a_resumed_run_goes_on_in_the_same_charts_without_steps_twice(folder: RunFolder) -> None:
    train(folder, 0, range(1, 8), loss=10.0)
    train(folder, 1, range(5, 11), loss=20.0)  # the last checkpoint was of step 4
    first = [(step, 10.0 + step) for step in range(1, 5)]
    assert charts(folder.tensorboard, "train/loss") == first + [(step, 20.0 + step) for step in range(5, 11)]
    assert charts(folder.tensorboard, "validation/loss") == [(10, 20.0)]
    assert charts(folder.tensorboard, "speed/tokens_per_s")[-1] == (10, 100.0)
    with pytest.raises(KeyError):
        charts(folder.tensorboard, "train/gradient_norm")


def test_no_sink_is_made_and_nothing_imported_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert make_sinks(RunFolder(tmp_path), [], first_step=1) == []
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'fleetune\[track\]'"):
        make_sinks(RunFolder(tmp_path), ["tensorboard"], first_step=1)
