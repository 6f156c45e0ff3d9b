from __future__ import annotations

import time
from pathlib import Path

import pytest

from fleetune.monitor.overview import curve, is_over, overview
from fleetune.spec.run_folder import RunFolder, append_line, write_json


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "two")
    run.create()
    write_json(run.lease, {"generation": 1, "holder": {"host": "here", "pid": 1}})
    append_line(run.events, {"event": "start", "attempt": 0, "num_steps": 20})
    for step in range(1, 11):
        row = {"attempt": 0, "step": step, "loss": 6.0 - step / 2, "tokens": 100, "step_s": 0.5, "data_wait_s": 0.0}
        append_line(run.metrics, {**row, "learning_rate": 1e-4, "peak_memory_bytes": 1 << 30})
    return run


def test_one_look_tells_how_far_how_fast_and_which_losses(folder: RunFolder) -> None:
    head, figures, *rest = overview(folder)
    assert head == "two: step 10/20, running"
    assert "loss 1.0000" in figures and "200 tokens/s" in figures and "5.0 s left" in figures
    assert rest[0].startswith("   5.5000") and rest[5].startswith("   1.0000")
    assert not is_over(folder)
    write_json(folder.lease, {"generation": 1, "holder": None})
    assert is_over(folder) and overview(folder)[0] == "two: step 10/20, not running"


@pytest.mark.claim(
    "H34",
    command="fleetune watch RUN",
    seen="the slowest rank is named",
)
@pytest.mark.claim(
    "X38",
    command="fleetune watch RUN",
    seen="machines, slowest rank and restarts live in the terminal",
)
@pytest.mark.claim(
    "H31",
    command="fleetune watch RUN",
    seen="machines, slowest rank and restarts live in the terminal",
)
def test_the_slowest_rank_the_restarts_and_the_machines_are_told(folder: RunFolder) -> None:
    for rank, step in ((0, 10), (1, 6)):
        state = {"rank": rank, "node": rank, "phase": "step", "step": step, "silent_s": 0.1, "attempt": 0, "pid": 1}
        write_json(folder.heartbeat / f"rank-{rank:05d}.json", state)
    for node in (0, 1):
        row = {"node": node, "host": f"host{node}", "time": time.time(), "cpu_percent": 50.0 + node}
        append_line(folder.load, {**row, "memory_used_bytes": 10**9, "memory_bytes": 4 * 10**9, "gpus": []})
    append_line(folder.events, {"event": "failure", "attempt": 0, "rank": 1, "node": 1, "cause": "node 1 (host1) is lost"})
    append_line(folder.events, {"event": "restart", "attempt": 1, "cause": "node 1 (host1) is lost", "step": 10})
    text = "\n".join(overview(folder))
    assert "slowest: rank 1 (node 1), 4 steps behind, in step of step 6" in text
    assert "node 0 (host0): CPU 50 %" in text and "node 1 (host1): CPU 51 %" in text
    assert "1 restart" in text and "node 1 (host1) is lost" in text


def test_a_curve_is_as_wide_as_there_is_room_and_falls_where_the_loss_falls() -> None:
    lines = curve([float(1000 - step) for step in range(1000)], width=60)
    assert len(lines) == 6 and max(map(len, lines)) <= 60
    assert lines[0].rstrip().endswith("▁") or "█" in lines[0]
    assert curve([], 60) == [] and curve([None], 60) == []
    assert len(curve([2.0, 2.0], 60)) == 6


def test_nothing_in_a_damaged_folder_stops_the_look(folder: RunFolder) -> None:
    (folder.heartbeat / "rank-00000.json").write_text("{")
    folder.lease.write_text("{")
    folder.load.write_text('{"node": 0')
    assert overview(folder)[0].startswith("two: step 10/20")
