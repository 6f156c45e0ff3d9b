"""The reference, made from the commands and the spec themselves: `python -m fleetune.cli.reference > docs/reference.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module

import click

from fleetune.cli.flags import Flags, bracketed
from fleetune.cli.main import COMMANDS
from fleetune.spec.declared import Declared, declared, section_titles

_HEAD = """# Reference

Made from the program itself by `make docs`; a test fails when it is stale.

Every setting of a run is a flag (`--learning-rate 1e-4`; underscores are as good as hyphens), an environment variable
(`FLEETUNE_LEARNING_RATE=1e-4`) and a line of a RUN.yaml (`learning_rate: 1e-4`). A flag wins over the environment, that over
the file, that over the model's preset, and that over the default. A flag given twice: the last wins. What is unknown is an
error, and all errors are told at once.

A RUN.yaml is flat: one `name: value` a line, without sections or tags. The `run.yaml` of a run folder is one too. Paths are
read from the folder in which the command is given, also those of a RUN.yaml.

On `--resume`, settings that are not given again stay as they were; those marked *resume* may be changed, any other change is
refused. What is given and could have no effect (`--lora-rank` with `--method full`, `--exact-match` without held-out rows) is
an error, never passed over.
"""

_EXITS = """## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | a crash: try again |
| 2 | something to mend: do not try again before |
| 3 | a check that was asked for did not hold (`verify`, `data inspect`, `export`) |
| 75 | asked to stop, and saved: go on with `--resume` |
| 130 | interrupted where nothing is saved |
"""


def reference() -> str:
    """The whole page, as markdown."""
    return "\n".join([_HEAD, *_settings(), *_commands(), _EXITS])


def _settings() -> Iterator[str]:
    yield "## Settings of a run\n"
    for section, title in section_titles().items():
        yield f"### {title}\n"
        for field in declared().values():
            if field.section == section:
                yield _setting(field)


def _setting(field: Declared) -> str:
    notes = [bracketed(field).strip("[]")] if bracketed(field) else []
    if field.kind == "choice":
        notes.insert(0, " or ".join(field.choices))
    if field.resume:
        notes.append("*resume*")
    also = [f"`{alias}`" for alias in field.aliases if alias != field.shown]
    if also:
        notes.append(f"also {', '.join(also)}")
    flag = f"{field.flag}` / `--no-{field.flag[2:]}" if field.kind == "switch" else field.flag
    return f"`{flag}`  \n{field.description}" + (f" ({'; '.join(notes)})" if notes else "") + "\n"


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    for name, about in COMMANDS.items():
        for flags in _flags_of(name):
            yield f"### fleetune {flags.name}\n"
            yield f"`fleetune {flags.name} {flags.usage_words}`\n"
            yield f"{flags.help or about}\n"
            yield from _own_flags(flags)


def _flags_of(command: str) -> list[Flags]:
    module = import_module(f"fleetune.cli.{command}")
    return [module.flags(verb) for verb in module.VERBS] if hasattr(module, "VERBS") else [module.flags()]


def _own_flags(flags: Flags) -> Iterator[str]:
    if len(flags.taken) == len(declared()):
        yield "It takes every setting of a run.\n"
    elif flags.taken:
        yield f"Settings of a run that it takes: {', '.join(f'`{field.flag}`' for field in flags.taken)}.\n"
    for option in flags.own:
        metavar = "" if option.is_flag else f" {option.metavar}"
        yield f"`{option.opts[0]}{metavar}`  \n{option.help}{_limits(option)}\n"


def _limits(option: click.Option) -> str:
    if isinstance(option.type, (click.IntRange, click.FloatRange)):
        low = f"above {option.type.min}" if option.type.min_open else f"at least {option.type.min}"
        high = f" and at most {option.type.max}" if option.type.max is not None else ""
        return f" ({low}{high})"
    return ""


if __name__ == "__main__":
    sys.stdout.write(reference())
