from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest

from fleetune.monitor.monitor import Monitor
from fleetune.monitor.progress import ProgressView
from fleetune.monitor.throughput import Throughput
from fleetune.spec.run_folder import RunFolder, append_line


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def record(folder: RunFolder, attempt: int, steps: range, **values: Any) -> None:
    with Monitor(folder, attempt=attempt) as monitor:
        for step in steps:
            monitor.record(
                {
                    "step": step,
                    "loss": 3.0 - step / 10,
                    "learning_rate": 2e-4,
                    "tokens": 1000,
                    "step_s": 1.9,
                    "data_wait_s": 0.1,
                    "peak_memory_bytes": 1_500_000_000,
                    **values,
                }
            )


def new_lines(stream: io.StringIO) -> list[str]:
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text.splitlines()


def test_an_evaluation_says_how_far_it_is(folder: RunFolder) -> None:
    stream = io.StringIO()
    view = ProgressView(folder, stream=stream)
    with Monitor(folder, attempt=0) as monitor:
        monitor.event("evaluating", what="answering held-out rows", done=0, total=100)
        monitor.event("evaluating", what="answering held-out rows", done=32, total=100)
    view.poll()
    assert new_lines(stream) == [
        "evaluating: answering held-out rows (100)",
        "evaluating: answering held-out rows (32 of 100)",
    ]


def test_without_a_terminal_there_is_one_plain_line_a_step(folder: RunFolder) -> None:
    stream = io.StringIO()
    view = ProgressView(folder, stream=stream, total_steps=20)
    view.poll()
    assert new_lines(stream) == []
    record(folder, 0, range(1, 4))
    view.poll()
    assert new_lines(stream) == [
        "step 1/20  loss 2.9000  learning rate 2.00e-04  500 tokens/s  1.5 GB  38 s left",
        "step 2/20  loss 2.8000  learning rate 2.00e-04  500 tokens/s  1.5 GB  36 s left",
        "step 3/20  loss 2.7000  learning rate 2.00e-04  500 tokens/s  1.5 GB  34 s left",
    ]
    view.poll()
    assert new_lines(stream) == [], "a row is shown once"
    with Monitor(folder, attempt=0) as monitor:
        monitor.validation(3, 2.5, 12.18)
        monitor.event("save", step=3, bytes=2_000_000, seconds=0.25)
    view.close()
    assert new_lines(stream)[:2] == ["step 3  held-out loss 2.5000  perplexity 12.18", "saved step 3 (2 MB in 0.2 s)"]
    view.close()
    assert new_lines(stream) == []


def test_plain_lines_may_be_one_every_so_many_steps(folder: RunFolder) -> None:
    stream = io.StringIO()
    view = ProgressView(folder, stream=stream, total_steps=7, every=3)
    record(folder, 0, range(1, 8))
    view.poll()
    assert [line.split("  ")[0] for line in new_lines(stream)] == ["step 3/7", "step 6/7", "step 7/7"]


def test_the_last_line_says_what_was_done(folder: RunFolder) -> None:
    stream = io.StringIO()
    with ProgressView(folder, stream=stream, total_steps=20):
        record(folder, 0, range(1, 4))
    assert re.fullmatch(r"3 of 20 steps, 3,000 tokens in 0\.\d s from start to end, last loss 2\.7000", new_lines(stream)[-1])
    with ProgressView(folder, stream=stream):
        pass
    assert new_lines(stream)[-1].startswith("no step was made")


def test_the_number_of_steps_is_learnt_from_the_start(folder: RunFolder) -> None:
    stream = io.StringIO()
    view = ProgressView(folder, stream=stream)
    record(folder, 0, range(1, 2))
    view.poll()
    assert new_lines(stream)[0].startswith("step 1  loss")
    append_line(folder.events, {"event": "start", "attempt": 0, "time": 1.0, "from_step": 0, "num_steps": 60})
    record(folder, 0, range(2, 3))
    view.poll()
    assert new_lines(stream)[0].startswith("step 2/60  loss")


def test_half_a_line_is_shown_when_it_is_whole_and_rubbish_never(folder: RunFolder) -> None:
    stream = io.StringIO()
    view = ProgressView(folder, stream=stream)
    row = '{"version": 1, "attempt": 0, "step": 1, "loss": 2.0, "tokens": 10, "step_s": 1.0}\n'
    with open(folder.metrics, "w", buffering=1) as file:
        file.write('rubbish\n[1]\n{"loss": 1}\n' + row[:30])
        file.flush()
        view.poll()
        assert new_lines(stream) == []
        file.write(row[30:])
        file.flush()
        view.poll()
    assert new_lines(stream)[0].startswith("step 1  loss 2.0000")


def test_what_an_earlier_start_has_written_is_not_shown_again_unless_asked_for(folder: RunFolder) -> None:
    record(folder, 0, range(1, 4))
    stream = io.StringIO()
    view = ProgressView(folder, stream=stream)
    record(folder, 1, range(3, 5))
    view.poll()
    assert [line.split("  ")[0] for line in new_lines(stream)] == ["step 3", "step 4"]
    ProgressView(folder, stream=stream, from_start=True).poll()
    assert [line.split("  ")[0] for line in new_lines(stream)] == ["step 1", "step 2", "step 3", "step 3", "step 4"]


def restart(folder: RunFolder) -> None:
    record(folder, 0, range(1, 4))
    append_line(
        folder.events, {"event": "failure", "attempt": 0, "rank": 1, "step": 3, "cause": "killed by signal 9", "time": 1.0}
    )
    append_line(folder.events, {"event": "restart", "attempt": 1, "step": 2, "cause": "killed", "delay_s": 1.0, "time": 2.0})
    append_line(folder.events, {"event": "start", "attempt": 1, "num_processes": 2, "time": 2.0})
    append_line(folder.events, {"event": "save_failed", "step": 3, "cause": "the disk\nis full", "time": 3.0})
    record(folder, 1, range(3, 5))


def test_restarts_and_failed_saves_are_told_at_every_level(folder: RunFolder) -> None:
    quiet, normal, everything = io.StringIO(), io.StringIO(), io.StringIO()
    views = [
        ProgressView(folder, stream=stream, level=level)
        for stream, level in ((quiet, "warning"), (normal, "info"), (everything, "debug"))
    ]
    restart(folder)
    for view in views:
        view.close()
    warnings = [
        "warning: failure (rank 1) at step 3: killed by signal 9",
        "warning: starting again in 1.0 s, going on after step 2",
        "warning: step 3 could not be saved, training goes on: the disk is full",
    ]
    assert new_lines(quiet) == warnings
    lines = new_lines(normal)
    assert lines[:3] == warnings and lines[-1].endswith("last loss 2.6000, 1 restart")
    assert any("start" in line and "num_processes 2" in line for line in new_lines(everything))
    assert not any("num_processes" in line for line in lines)


def test_an_event_nobody_has_described_is_told_with_its_fields_and_cannot_steer_the_terminal(folder: RunFolder) -> None:
    stream = io.StringIO()
    view = ProgressView(folder, stream=stream)
    append_line(folder.events, {"event": "node_joined", "step": 4, "address": "10.0.0.1\x1b[2J", "time": 1.0})
    append_line(folder.events, {"event": "odd", "cause": "something", "time": 2.0})
    view.poll()
    assert new_lines(stream) == ["node joined at step 4 (address 10.0.0.1?[2J)", "warning: odd: something"]


def on_a_terminal(folder: RunFolder, level: str = "info", *, colour: bool = True) -> str:
    """What a view writes to a real (pseudo) terminal while a run is going on."""
    main, end = pty.openpty()
    with os.fdopen(end, "w", encoding="utf-8") as stream:
        view = ProgressView(folder, stream=stream, total_steps=10, level=level)
        view.poll()
        restart(folder)
        view.poll()
        view.close()
        stream.flush()
        os.set_blocking(main, False)
        chunks = []
        while True:
            try:
                chunk = os.read(main, 1 << 16)
            except BlockingIOError:
                break
            chunks.append(chunk)
    os.close(main)
    return b"".join(chunks).decode()


@pytest.mark.claim(
    "X36",
    command="fleetune train",
    seen="a live display in a terminal, a plain line a step elsewhere",
)
def test_on_a_terminal_the_display_is_live_and_readable_without_colour(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    text = on_a_terminal(folder)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "before the first step" in plain
    for part in ("step 4/10", "loss 2.6000", "learning rate 2.00e-04", "500 tokens/s", "1.5 GB", "12 s left", "1 restart"):
        assert part in plain, part
    assert "warning: starting again" in plain
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", text), "a colour although NO_COLOR is set"
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor must come back"


def test_a_terminal_stays_quiet_when_only_warnings_are_wanted(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = on_a_terminal(folder, "warning").splitlines()
    assert len(lines) == 3 and all(line.startswith("warning: ") for line in lines)


def test_speed_and_time_left_forget_the_first_step_and_the_distant_past() -> None:
    throughput = Throughput(window=3)
    assert throughput.tokens_per_s is None and throughput.time_left(5) is None
    throughput.add(100, 10.0)
    assert throughput.tokens_per_s == 10 and throughput.time_left(2) == 20
    throughput.add(100, 1.0)
    assert throughput.tokens_per_s == 100, "the first step pays for warming up"
    for _ in range(3):
        throughput.add(100, 2.0)
    assert throughput.tokens_per_s == 50 and throughput.time_left(10) == 20
    throughput.restart()
    assert throughput.tokens_per_s is None


def test_the_view_needs_no_torch(folder: RunFolder) -> None:
    record(folder, 0, range(1, 3))
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from fleetune.monitor.progress import ProgressView\n"
        "from fleetune.monitor.summary import print_summary\n"
        "from fleetune.monitor.ledger import compare\n"
        "from fleetune.spec.run_folder import RunFolder\n"
        f"ProgressView(RunFolder(Path({str(folder.path)!r})), stream=sys.stdout, from_start=True).close()\n"
        "print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step 1  loss") and lines[-1] == "False", done.stderr


def test_standard_error_is_the_stream_unless_another_is_given(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    view = ProgressView(folder)
    record(folder, 0, range(1, 2))
    view.close()
    captured: TextIO | Any = capsys.readouterr()
    assert captured.out == "" and "step 1" in captured.err
