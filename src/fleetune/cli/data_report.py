"""The label audit and example rows on standard output: with colours on a terminal, readable without them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fleetune.cli.words import table
from fleetune.monitor.figures import count, printable, share

if TYPE_CHECKING:
    from fleetune.data.preview import Example
    from fleetune.data.report import DataReport

#: Widest bar of the length histogram, in characters.
_BAR = 40
_OVER_LONG = {
    "drop": "are dropped",
    "cut": "are cut at their end",
    "split": "are split into pieces",
    "error": "stop the run",
}


def print_report(report: DataReport) -> None:
    """The whole report, as lines that need no colour to be understood."""
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        ("Files", list(_files(report))),
        ("Rows", list(_rows(report))),
        ("What is trained", list(_trained(report))),
    ]
    for title, rows in sections:
        _title(title)
        print("\n".join(table(rows)))
    _title("Lengths in tokens")
    print("\n".join(_histogram(report.lengths)))
    if report.causes:
        _title("Rows that cannot be used")
        print("\n".join(table([(count(number), cause) for cause, number in report.causes.items()])))
        for bad in report.bad_examples:
            where = f"line {bad['line']}" if bad.get("line") else f"row {bad['row']}"
            print(f"  {bad['file']}, {where}: {printable(str(bad['cause']))}")
    for warning in report.warnings:
        print(f"warning: {warning}")


def _files(report: DataReport) -> Iterator[tuple[str, str]]:
    for file in report.files:
        columns = ", ".join(f"{role}={column}" for role, column in file.columns.items())
        found = f"{file.format}, {file.shape or 'no shape'}" + (f" ({columns})" if columns else "")
        yield printable(file.path), f"{found}, {count(file.rows)} rows"
    for passed in report.passed_over:
        yield "passed over", printable(passed)


def _rows(report: DataReport) -> Iterator[tuple[str, str]]:
    yield "usable", count(report.rows)
    yield "not usable", count(report.bad_rows)
    over_long = report.over_long
    yield (
        f"longer than {report.sequence_length} tokens",
        f"{count(over_long['rows'])}" + (f", which {_OVER_LONG[over_long['policy']]}" if over_long["rows"] else ""),
    )
    if over_long.get("answers_cut_off"):
        yield "answers cut off", count(over_long["answers_cut_off"])
    yield "sequences of an epoch", f"{count(report.sequences)}, filled to {share(report.efficiency)}"


def _trained(report: DataReport) -> Iterator[tuple[str, str]]:
    yield "tokens", f"{count(report.tokens)}, of which trained {count(report.trained_tokens)} ({share(report.trained_share)})"
    if report.turns:
        yield "answers", f"{count(report.turns)}, of which end with a trained end of turn {count(report.turns_ended)}"
    yield "double begin of text", f"{count(report.double_bos)} rows"
    yield "control tokens as text", f"{count(report.literals)} in {count(report.rows_with_literals)} rows"
    yield from report.notes.items()


def _histogram(lengths: Sequence[Sequence[int]]) -> Iterator[str]:
    """[upper bound, rows] pairs as bars."""
    largest = max((number for _, number in lengths), default=0)
    for bound, number in lengths:
        if largest:
            bar = "#" * -(-number * _BAR // largest)
            yield f"{'up to ' + count(bound):>14}  {bar:<{_BAR}}  {count(number)}"


def print_examples(examples: Sequence[Example]) -> None:
    """Rows as the model sees them; what is trained stands in brackets, and in green on a terminal."""
    left, right = ("\u27e6", "\u27e7") if _writes("\u27e6") else ("[[", "]]")
    for one in examples:
        trained = sum(segment.num_tokens for segment in one.segments if segment.trained)
        whole = sum(segment.num_tokens for segment in one.segments)
        _title(f"Row {one.sample}: {trained} of {whole} tokens are trained, those in {left} {right}")
        print("".join(_marked(segment, left, right) for segment in one.segments))


def _marked(segment: Any, left: str, right: str) -> str:
    text = printable(segment.text)
    if not segment.trained:
        return text
    return f"\x1b[32m{left}{text}{right}\x1b[0m" if _is_coloured() else f"{left}{text}{right}"


def _title(text: str) -> None:
    print(f"\n\x1b[1m{text}\x1b[0m" if _is_coloured() else f"\n{text}")


def _is_coloured() -> bool:
    import os

    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _writes(text: str) -> bool:
    """Whether standard output's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
