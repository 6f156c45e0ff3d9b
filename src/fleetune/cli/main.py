"""`fleetune`: the table of commands. It imports nothing until a command is chosen, so that help comes at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

#: Command -> what it does. Each is the file of its name in this room, with `run(words) -> exit code`.
COMMANDS = {
    "train": "fine-tune a model, or go on with a run",
    "plan": "what a run would be: batches, parameters, memory; nothing is started",
    "data": "inspect or preview rows: their shape, what is trained, what is wrong",
    "evaluate": "loss, perplexity and exact match of a model on rows",
    "generate": "one reply of a model",
    "chat": "a conversation with a model",
    "export": "the result of a run as an adapter or a merged model, checked",
    "resize": "give a run that goes on more processes, or fewer",
    "verify": "prove from its ledger what a run has trained",
    "doctor": "can this machine, or these together, train? plain words, a fix each",
    "watch": "a run live in the terminal: losses, speed, ranks, machines",
    "compare": "several models or settings at the same time, one table at the end",
    "presets": "the models that have a short name",
    "bench": "how fast training is on this machine, beside TRL",
}


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name.ljust(width)}{about}" for name, about in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fleetune COMMAND ...",
            "",
            "Fine-tune a Hugging Face language model on whatever machines you have.",
            "",
            *lines,
            "",
            "fleetune COMMAND --help tells the flags of a command; fleetune --version the version.",
            "A first run: fleetune train --model smollm2-135m --data YOUR.jsonl --validation-share 0.1",
        ]
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code: 0 done, 1 crash, 2 yours to mend, 3 a check failed, 75 saved, resume."""
    words = list(sys.argv[1:] if words is None else words)
    if not words or words[0] in ("-h", "--help", "help"):
        return _show(usage(), 0 if words else 2)
    if words[0] in ("-V", "--version", "version"):
        from fleetune import __version__

        return _show(f"fleetune {__version__}", 0)
    if words[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean fleetune {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"error: there is no command {words[0]!r}: {hint}", file=sys.stderr)
        return 2
    from importlib import import_module

    from fleetune.cli.exits import guarded

    command = words[0]
    return guarded(lambda: import_module(f"fleetune.cli.{command}").run(words[1:]))


def _show(text: str, code: int) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        from fleetune.cli.exits import leave_stdout

        leave_stdout()
    return code


if __name__ == "__main__":
    sys.exit(main())
