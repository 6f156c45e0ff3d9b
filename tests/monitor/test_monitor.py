from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleetune.monitor.monitor import Monitor
from fleetune.monitor.rows import RowFile
from fleetune.spec.run_folder import RunFolder, effective_rows, read_lines


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def step_row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.5 / step,
        "gradient_norm": 1.0,
        "learning_rate": 1e-4,
        "tokens": 800,
        "trained_tokens": 300,
        "tokens_per_s": 400.0,
        "step_s": 2.0,
        "data_wait_s": 0.0,
        "bytes_sent": 0,
        "peak_memory_bytes": 10**9,
        **values,
    }


def ledger_row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "samples": [f"train:{step}"],
        "trained_tokens": 300,
        "loss_hex": (2.5 / step).hex(),
        "gradient_norm_hex": (1.0).hex(),
        "applied": True,
    }


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As on a full disk, no file of this process can grow beyond `num_bytes`."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.claim(
    "H36",
    command="fleetune train",
    seen="tokens/s and memory of every step are recorded",
)
def test_a_step_has_all_keys_that_others_read(folder: RunFolder) -> None:
    before = time.time()
    with Monitor(folder, attempt=3) as monitor:
        monitor.record(step_row(1))
        monitor.commit(ledger_row(1))
        monitor.validation(1, 2.25, 9.49)
    step, validation = read_lines(folder.metrics)
    assert set(step) == {"version", "attempt", "time", *step_row(1)}
    assert step["attempt"] == 3 and step["version"] == 1 and before - 1 < step["time"] < time.time() + 1
    assert {**step, **step_row(1)} == step
    assert (validation["step"], validation["validation_loss"], validation["validation_perplexity"]) == (1, 2.25, 9.49)
    (committed,) = read_lines(folder.ledger)
    assert committed == {"version": 1, "attempt": 3, **ledger_row(1)}
    assert list(effective_rows(folder.metrics)) == [1], "a held-out row is no step"


def test_a_number_that_is_none_becomes_null_with_a_note(folder: RunFolder) -> None:
    with Monitor(folder, attempt=0) as monitor:
        monitor.record(step_row(1, loss=float("nan"), gradient_norm=float("inf"), note="fp16"))
        monitor.validation(1, float("nan"), float("nan"))
    lines = folder.metrics.read_text().splitlines()
    first = json.loads(lines[0], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert first["loss"] is None and first["gradient_norm"] is None
    assert first["note"] == "fp16; loss was nan, gradient_norm was inf"
    assert json.loads(lines[1])["validation_loss"] is None


def test_an_event_says_what_where_when_and_why_and_no_secret(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "open sesame 7")
    with Monitor(folder, attempt=1, node=2) as monitor:
        monitor.event(
            "save_failed", step=7, cause="login open sesame 7 was refused", paths=["hf_abcdefghijkl"], rate=float("inf")
        )
    (event,) = read_lines(folder.events)
    assert event["event"] == "save_failed" and event["step"] == 7
    assert (event["attempt"], event["rank"], event["node"]) == (1, 0, 2) and event["time"] > 0
    assert event["cause"] == "login [secret] was refused" and event["paths"] == ["[secret]"] and event["rate"] is None


def test_no_row_is_lost_when_the_process_is_killed_between_two_steps(folder: RunFolder) -> None:
    child = os.fork()
    if child == 0:
        monitor = Monitor(folder, attempt=0)
        for step in range(1, 51):
            monitor.record(step_row(step))
            monitor.commit(ledger_row(step))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [row["step"] for row in read_lines(folder.metrics)] == list(range(1, 51))
    assert [row["step"] for row in read_lines(folder.ledger)] == list(range(1, 51))


def test_a_row_is_not_glued_to_one_that_a_crash_has_torn(folder: RunFolder) -> None:
    folder.ledger.write_text('{"version": 1, "attempt": 0, "step": 1, "loss_hex": "0x1p+0"}\n{"version": 1, "att')
    with Monitor(folder, attempt=1) as monitor:
        monitor.commit(ledger_row(2))
        monitor.commit(ledger_row(3))
    assert [row["step"] for row in read_lines(folder.ledger)] == [1, 2, 3]


def test_a_disk_that_is_full_for_a_while_loses_no_row_and_stops_nothing(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with Monitor(folder, attempt=0) as monitor:
        for step in range(1, 4):
            monitor.commit(ledger_row(step))
        assert monitor.flush()
        with largest_file(folder.ledger.stat().st_size + 40):  # in the middle of the next row
            for step in range(4, 9):
                monitor.commit(ledger_row(step))
            assert not monitor.flush()
        monitor.commit(ledger_row(9))
        assert monitor.flush()
        monitor.commit(ledger_row(10))
    rows = list(read_lines(folder.ledger))
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[3] == {"version": 1, "attempt": 0, **ledger_row(4)}
    assert len([record for record in caplog.records if "takes no rows" in record.message]) == 1


def test_rows_wait_for_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "absent" / "rows.jsonl")
    file.append({"step": 1})
    assert not file.sync()
    (tmp_path / "absent").mkdir()
    file.append({"step": 2})
    file.close()
    assert [row["step"] for row in read_lines(tmp_path / "absent" / "rows.jsonl")] == [1, 2]


class Collecting:
    """A sink that remembers, and fails from the n-th call on."""

    def __init__(self, fails_at: int = 10**9) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.fails_at = fails_at

    def _take(self, kind: str, row: Any = None) -> None:
        if len(self.seen) + 1 >= self.fails_at:
            raise ConnectionError("the tracking server is gone")
        self.seen.append((kind, row))

    def step(self, row: Any) -> None:
        self._take("step", row["step"])

    def validation(self, row: Any) -> None:
        self._take("validation", row["step"])

    def event(self, row: Any) -> None:
        self._take("event", row["event"])

    def flush(self) -> None:
        self._take("flush")

    def close(self) -> None:
        self._take("close")


def test_every_sink_gets_every_record_and_one_that_fails_is_left_out(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Collecting(), Collecting(fails_at=2)
    with Monitor(folder, attempt=0, sinks=[bad, good]) as monitor:
        monitor.record(step_row(1))
        monitor.record(step_row(2))
        monitor.validation(2, 1.0, 2.7)
        monitor.event("save", step=2)
        monitor.flush()
    assert good.seen == [("step", 1), ("step", 2), ("validation", 2), ("event", "save"), ("flush", None), ("close", None)]
    assert bad.seen == [("step", 1)]
    assert [record.message for record in caplog.records if "tracking server is gone" in record.message]
    assert [row["step"] for row in read_lines(folder.metrics)] == [1, 2, 2]


def test_recording_costs_far_under_one_percent_of_a_step(folder: RunFolder) -> None:
    samples = [f"train:{row}" for row in range(64)]
    costs = []
    with Monitor(folder, attempt=0) as monitor:
        for step in range(1, 301):
            began = time.perf_counter()
            monitor.record(step_row(step))
            monitor.commit({**ledger_row(step), "samples": samples})
            costs.append(time.perf_counter() - began)
    # 0.5 ms is 0.5 % of a step of 0.1 s; the median does not mind a busy machine.
    assert sorted(costs)[150] < 0.0005
