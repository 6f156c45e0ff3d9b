"""Command lines as h2oGPT reads them: `--flag=value`, `--flag value`, `--flag` and `--noflag`, values as Python writes them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "H2OGPT_"


def read_words(words: Sequence[str], known: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(values of the flags in `known` by name, all other words in order). A flag given twice: the last wins."""
    found: dict[str, Any] = {}
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or (name not in known and name.removeprefix("no") not in known):
            rest.append(word)
        elif name not in known:
            found[name.removeprefix("no")] = False
        elif equals:
            found[name] = read_value(value)
        elif position < len(words) and not words[position].startswith("--"):
            found[name] = read_value(words[position])
            position += 1
        else:
            found[name] = True
    return found, rest


def read_environment(environment: Mapping[str, str], known: Sequence[str]) -> dict[str, Any]:
    """Values of the variables `H2OGPT_<FLAG>`; an empty one counts as not set."""
    names = {PREFIX + name.upper(): name for name in known}
    return {names[name]: read_value(value) for name, value in environment.items() if name in names and value}


def read_value(text: str) -> Any:
    """A Python literal, or the text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
