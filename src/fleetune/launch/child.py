"""The first thing that runs in every process of a run: `python -m fleetune.launch.child [options] MODULE [arguments]`.

It ties the process to its supervisor, imports what will be needed while others still prepare (`--preload`), waits until it
is told to go (`--wait`: one line on standard input, a JSON list of further arguments), and then calls the module's
`main(arguments) -> exit code`. The process ends without Python's own shutdown, in which foreign threads could hang.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fleetune.launch import lifeline

#: Longest line that `--wait` reads, in bytes.
_MAX_LINE = 65536


@dataclass(frozen=True)
class Call:
    """What a process was asked to do. single_threaded: it is going to fork, so nothing here may start a thread."""

    module: str
    arguments: tuple[str, ...]
    preload: tuple[str, ...] = ()
    waits: bool = False
    single_threaded: bool = False

    def argv(self) -> list[str]:
        """The words after `python -m fleetune.launch.child`."""
        options = [f"--preload={name}" for name in self.preload]
        if self.waits:
            options.append("--wait")
        if self.single_threaded:
            options.append("--single-threaded")
        return [*options, self.module, *self.arguments]


def parse(words: Sequence[str]) -> Call:
    """The inverse of `Call.argv`. Raises ValueError."""
    preload: list[str] = []
    waits = single_threaded = False
    for position, word in enumerate(words):
        if word.startswith("--preload="):
            preload.append(word.partition("=")[2])
        elif word == "--wait":
            waits = True
        elif word == "--single-threaded":
            single_threaded = True
        elif word.startswith("-"):
            raise ValueError(f"unknown option {word}")
        else:
            return Call(word, tuple(words[position + 1 :]), tuple(preload), waits, single_threaded)
    raise ValueError("no module named")


def run(call: Call) -> int:
    """Run the module in this process; returns its exit code. Never raises."""
    lifeline.watch(with_thread=not call.single_threaded)
    _forget_current_folder()
    for name in call.preload:
        try:
            importlib.import_module(name)
        except Exception as error:  # whoever needs it will say so where it can be explained
            print(f"could not import {name} ahead of time: {error}", file=sys.stderr)
    arguments = call.arguments
    if call.waits:
        line = _read_line()
        if not line:
            return 1  # the supervisor closed the pipe: this process is not needed
        arguments += tuple(json.loads(line))
    _leave_standard_input()
    try:
        return int(importlib.import_module(call.module).main(list(arguments)))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def _forget_current_folder() -> None:
    """A file of the person's folder must not pass for a library (Python 3.11 has PYTHONSAFEPATH for it, 3.10 has not)."""
    if not getattr(sys.flags, "safe_path", False) and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


def _read_line() -> bytes:
    """One line of standard input; empty at the end of the file."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_LINE:
        piece = os.read(0, 1)
        if not piece:
            return b""
        line += piece
    return line


def _leave_standard_input() -> None:
    """Nothing in a run may wait for a person's typing."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing != 0:
        os.close(nothing)


if __name__ == "__main__":
    exit_code = run(parse(sys.argv[1:]))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may read any more
            stream.flush()
    os._exit(exit_code)
