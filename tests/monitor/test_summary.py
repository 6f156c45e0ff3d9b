from __future__ import annotations

import io
from typing import Any

from fleetune.monitor.figures import duration, memory, number, printable, share, speed
from fleetune.monitor.summary import print_summary, summary_lines


def summary(**more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "before": {"loss": 2.0, "perplexity": 7.389, "exact_match": 0.0, "rows": 50, "trained_tokens": 900},
        "after": {"loss": 0.125, "perplexity": 1.133, "exact_match": 0.93, "rows": 50, "trained_tokens": 900},
        "steps": 100,
        "result_step": 100,
        "training_s": 187.4,
        "trained_tokens": 1234567,
        "peak_memory_bytes": 4_500_000_000,
        "result": "runs/quickstart/adapter",
        "replies": [],
        **more,
    }


def test_without_a_terminal_the_summary_is_plain_aligned_lines() -> None:
    stream = io.StringIO()
    print_summary(summary(), stream=stream)
    assert stream.getvalue().splitlines() == [
        "                            before  after",
        "held-out loss               2.0000  0.1250",
        "perplexity                  7.39    1.13",
        "exact match                 0.0 %   93.0 %",
        "steps                       100",
        "training time               3 min 07 s",
        "trained tokens              1,234,567",
        "peak memory (largest rank)  4.5 GB",
        "result                      runs/quickstart/adapter",
    ]


def test_what_was_not_measured_is_not_shown() -> None:
    lines = summary_lines(summary(before=None, after=None, replies=None, peak_memory_bytes=0))
    assert lines[0].startswith("steps") and not any("loss" in line or "memory" in line for line in lines)
    values = {"loss": 1.0, "perplexity": 2.7, "exact_match": None}
    lines = summary_lines(summary(before=None, after=values))
    assert lines[1].split()[-2:] == ["-", "1.0000"] and not any("exact" in line for line in lines)


def test_an_earlier_step_that_was_better_is_named() -> None:
    assert any(line.split() == ["best", "step", "60"] for line in summary_lines(summary(result_step=60)))


REPLY = {
    "sample": "validation:1",
    "prompt": "Turn the lamp on",
    "wanted": '{"lamp": "on"}',
    "before": "Sure! [bold]Here[/bold]\x1b]0;owned\x07",
    "after": '{"lamp": "on"}',
    "right": True,
}


def test_two_replies_are_shown_with_what_was_wanted() -> None:
    lines = summary_lines(summary(replies=[REPLY]))
    assert lines[-4:] == [
        "prompt: Turn the lamp on",
        'wanted: {"lamp": "on"}',
        "before: Sure! [bold]Here[/bold]?]0;owned?",
        'after:  {"lamp": "on"}',
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_are_tables_and_nothing_a_model_said_steers_it(monkeypatch: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    long = {**REPLY, "before": "word " * 1000, "after": None}
    print_summary(summary(replies=[REPLY, long], result="/a/very/long/path/" * 8 + "end"), stream=stream)
    text = stream.getvalue()
    for part in ("held-out loss", "93.0 %", "3 min 07 s", "4.5 GB", "Sure! [bold]Here[/bold]?]0;owned?", "Turn the lamp on"):
        assert part in text, part
    assert "\x07" not in text and "\x1b]" not in text
    assert "end" in text, "a long path is folded, not cut"
    assert len(text) < 10_000


def test_figures_read_well() -> None:
    assert [duration(value) for value in (0.25, 9.96, 59.4, 60, 3599, 3600, 100_000, 200_000, float("nan"))] == [
        "0.2 s",
        "10 s",
        "59 s",
        "1 min 00 s",
        "59 min 59 s",
        "1 h 00 min",
        "1 d 04 h",
        "2 d 08 h",
        "?",
    ]
    assert [memory(value) for value in (5e5, 512e6, 9.996e8, 4.54e9, 2e12)] == ["0 MB", "512 MB", "1.0 GB", "4.5 GB", "2.0 TB"]
    assert [number(value) for value in (None, 1.23456, 1e7)] == ["-", "1.2346", "1.00e+07"]
    assert [speed(value) for value in (3.14, 345.6, 12345)] == ["3.1 tokens/s", "346 tokens/s", "12,345 tokens/s"]
    assert [share(value) for value in (None, 0.875, 0.0)] == ["-", "87.5 %", "0.0 %"]
    assert printable("a\tb\x00\x1b[31m\u202e\nü") == "a    b??[31m?\nü"
