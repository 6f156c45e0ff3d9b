"""`fleetune watch`: a run live in the terminal, from any other terminal that sees its folder."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fleetune.cli.flags import Flags, one_word, switch
from fleetune.monitor.overview import is_over, overview
from fleetune.spec.errors import EXIT_DONE, UserError
from fleetune.spec.run_folder import RunFolder

ABOUT = """Watch a run live: its losses as a curve, how fast it is, which rank is the slowest, how busy each machine is, and
what went wrong. It only reads the run folder. Where the output is no terminal, or with --once, one picture is printed."""

_EVERY_S = 1.0


def flags() -> Flags:
    return Flags("watch", ABOUT, usage="RUN [--once]", own=[switch("--once", "Print one picture and end.")])


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    folder = RunFolder(Path(one_word(typed, "run folder", "fleetune watch RUN")))
    if not folder.exists():
        raise UserError(f"{folder.path} holds no run: give the folder that fleetune train names at its start")
    if typed.own["once"] or not sys.stdout.isatty():
        print("\n".join(overview(folder, width=shutil.get_terminal_size((100, 24)).columns)))
        return EXIT_DONE
    with suppress(KeyboardInterrupt):  # the watcher goes, the run goes on
        follow(folder)
    return EXIT_DONE


def follow(folder: RunFolder) -> None:
    """Show the run again and again, until it ends."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()

    def picture() -> Text:
        return Text("\n".join(overview(folder, width=console.width)), no_wrap=True, overflow="ellipsis")

    with Live(picture(), console=console, auto_refresh=False) as live:
        while True:
            over = is_over(folder)
            live.update(picture(), refresh=True)
            if over:
                return
            time.sleep(_EVERY_S)
