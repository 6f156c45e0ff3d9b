"""`fleetune chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fleetune.cli.flags import Flags, one_word
from fleetune.cli.generate import FIELDS, SAMPLING, opened, sampling, write
from fleetune.cli.reading import read_spec, start_logging
from fleetune.cli.words import say
from fleetune.spec.errors import EXIT_DONE

ABOUT = """Talk with a model, turn by turn. MODEL is anything that --model of train takes: a run folder is its result.

/new forgets the conversation; /quit, or the end of the input (Ctrl-D), ends it."""


def flags() -> Flags:
    return Flags("chat", ABOUT, usage="MODEL [FLAGS]", fields=FIELDS, own=SAMPLING)


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    spec = read_spec(typed, one_word(typed, "model", "fleetune chat MODEL"))
    start_logging(spec)
    settings = sampling(spec, typed)
    generator = opened(spec)
    system = [{"role": "system", "content": typed.own["system"]}] if typed.own["system"] else []
    said: list[dict[str, Any]] = [*system]
    say(f"{spec.weights.model} listens: /new forgets, /quit ends")
    while True:
        line = _next_line()
        if line is None or line.strip() in ("/quit", "/exit"):
            return EXIT_DONE
        if line.strip() == "/new":
            said = [*system]
        elif line.strip():
            said.append({"role": "user", "content": line})
            said.append({"role": "assistant", "content": generator.reply(said, settings, write)})
            print(flush=True)


def _next_line() -> str | None:
    """What the person writes; None at the end. The prompt is talk, so that standard output holds the replies alone."""
    if sys.stdin.isatty():
        from contextlib import suppress

        with suppress(ImportError):
            import readline  # noqa: F401 (lines can be edited)
    sys.stderr.write("> ")
    sys.stderr.flush()
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return None
    return line.rstrip("\n") if line else None
