"""Numbers as a person reads them. Only ASCII: it must be readable on any terminal."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """`45 s`, `12 min 30 s`, `3 h 05 min`, `2 d 04 h`."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def memory(count: float) -> str:
    """`512 MB`, `4.5 GB`: powers of 1000."""
    value, units = count / 1e6, ["MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "MB" else f"{value:.1f} {units[0]}"


def count(number: float) -> str:
    """`1,234,567`."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """`1 restart`, `2 restarts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def speed(tokens_per_s: float) -> str:
    """`345 tokens/s`; below ten with one decimal."""
    return f"{tokens_per_s:.1f} tokens/s" if tokens_per_s < 10 else f"{tokens_per_s:,.0f} tokens/s"


def number(value: float | None, digits: int = 4) -> str:
    """A loss or perplexity with `digits` decimals; very large ones in powers of ten; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.2e}"


def share(value: float | None) -> str:
    """`87.5 %` of a share from 0 to 1; `-` where there is none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def printable(text: str) -> str:
    """Text of a model or a data file without control characters: it must not steer the terminal. Newlines stay."""
    return "".join(char if char == "\n" or char.isprintable() else "?" for char in text.replace("\t", "    "))
