from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.launch import load
from fleetune.launch.load import Load


def test_a_row_every_few_seconds_says_how_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Load(node=3)
    first = sampler.row()
    assert first is not None and first["node"] == 3 and 0 < first["memory_used_bytes"] < first["memory_bytes"]
    assert 0 <= first["cpu_percent"] <= 100 and isinstance(first["gpus"], list)
    assert sampler.row() is None, "rows come too often"
    monkeypatch.setattr(load, "EVERY_S", 0.0)
    sampler._next = 0.0
    second = sampler.row()
    assert second is not None and second["sent_bytes_per_s"] >= 0


@pytest.mark.claim(
    "X38",
    command="fleetune watch RUN",
    seen="with a GPU: its load and memory, through NVML",
)
@pytest.mark.claim(
    "H31",
    command="fleetune watch RUN",
    seen="with a GPU: its load and memory, through NVML",
)
@pytest.mark.cuda
def test_a_gpu_is_seen_with_its_load_and_memory() -> None:
    if not Path("/dev/nvidia0").exists():
        pytest.skip("no GPU here")
    row = Load().row()
    assert row is not None and row["gpus"][0]["memory_bytes"] > 1e9 and row["gpus"][0]["load_percent"] >= 0
