"""The table at the end of a run: what the model was worth before and after, what it cost, and where the result is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from fleetune.monitor.account import account_rows
from fleetune.monitor.figures import count, duration, memory, number, printable, share

if TYPE_CHECKING:
    from rich.console import Console

Summary = Mapping[str, Any]


def print_summary(summary: Summary, *, stream: TextIO | None = None) -> None:
    """Print the content of `summary.json`: as tables on a terminal, as plain lines elsewhere.

    `before` and `after` are as `evaluate --json` gives them, or null; `replies` is a list of {prompt, wanted, before, after}.
    """
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        from rich.console import Console

        _print_tables(summary, Console(file=stream))
    else:
        stream.write("\n".join(summary_lines(summary)) + "\n")
        stream.flush()


def worth_rows(summary: Summary) -> list[tuple[str, str, str]]:
    """(what, before, after) of the held-out figures; empty where there was no held-out data."""
    before, after = summary.get("before") or {}, summary.get("after") or {}
    if not before and not after:
        return []
    rows = [
        ("held-out loss", number(before.get("loss")), number(after.get("loss"))),
        ("perplexity", number(before.get("perplexity"), 2), number(after.get("perplexity"), 2)),
    ]
    if before.get("exact_match") is not None or after.get("exact_match") is not None:
        rows.append(("exact match", share(before.get("exact_match")), share(after.get("exact_match"))))
    return rows


def fact_rows(summary: Summary) -> list[tuple[str, str]]:
    """(what, value) of what was done and where it is; only what the summary has."""
    facts = []
    if summary.get("steps") is not None:
        facts.append(("steps", count(summary["steps"])))
    if summary.get("training_s") is not None:
        facts.append(("training time", duration(summary["training_s"])))
    if summary.get("trained_tokens") is not None:
        facts.append(("trained tokens", count(summary["trained_tokens"])))
    if summary.get("peak_memory_bytes"):
        facts.append(("peak memory (largest rank)", memory(summary["peak_memory_bytes"])))
    if base := summary.get("base"):
        wide = f"{memory(base['unquantized_bytes'])} in {base['precision']}"
        facts.append((f"base ({base['quantize']})", f"{memory(base['bytes'])} instead of {wide}"))
    if summary.get("result_step") is not None and summary["result_step"] != summary.get("steps"):
        facts.append(("best step", count(summary["result_step"])))
    account = summary.get("account") or {}
    if account.get("failures") or account.get("resizes") or account.get("recomputed_steps"):
        facts += account_rows(account)
    if summary.get("result"):
        facts.append(("result", printable(str(summary["result"]))))
    return facts


def summary_lines(summary: Summary) -> list[str]:
    """The summary as plain aligned lines of at most the width that its values need."""
    lines = []
    worth, facts = worth_rows(summary), fact_rows(summary)
    width = max((len(row[0]) for row in (*worth, *facts)), default=0) + 2
    if worth:
        column = max(len(row[1]) for row in worth) + 2
        column = max(column, len("before") + 2)
        lines.append(" " * width + "before".ljust(column) + "after")
        lines += [what.ljust(width) + before.ljust(column) + after for what, before, after in worth]
    lines += [what.ljust(width) + value for what, value in facts]
    for reply in summary.get("replies") or ():
        lines += ["", f"prompt: {_text(reply.get('prompt'))}"]
        if reply.get("wanted") is not None:
            lines.append(f"wanted: {_text(reply['wanted'])}")
        lines += [f"before: {_text(reply.get('before'))}", f"after:  {_text(reply.get('after'))}"]
    return lines


def _print_tables(summary: Summary, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Result", title_justify="left", show_header=True)
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    worth = worth_rows(summary)
    for what, before, after in worth:
        table.add_row(what, before, after)
    if worth:
        console.print(table)
    facts = Table.grid(padding=(0, 2))
    for what, value in fact_rows(summary):
        facts.add_row(Text(what), Text(value, overflow="fold"))
    console.print(facts)
    for reply in summary.get("replies") or ():
        side_by_side = Table(title=Text(f"Prompt: {_text(reply.get('prompt'))}"), title_justify="left", expand=True)
        for column in ("before", "after"):
            side_by_side.add_column(column, ratio=1, overflow="fold")
        side_by_side.add_row(Text(_text(reply.get("before"))), Text(_text(reply.get("after"))))
        if reply.get("wanted") is not None:
            side_by_side.caption = Text(f"wanted: {_text(reply['wanted'])}")
            side_by_side.caption_justify = "left"
        console.print(side_by_side)


def _text(value: Any, limit: int = 600) -> str:
    """Text of a model or a data file, safe for a terminal and not endless."""
    if value is None:
        return "-"
    text = printable(str(value)).strip()
    return text if len(text) <= limit else text[:limit] + " ..."
