"""`fleetune resize`: give a run that goes on more processes, or fewer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fleetune.cli.flags import Flags, one_word, option
from fleetune.cli.words import say
from fleetune.launch.devices import choose_processes
from fleetune.launch.lease import live_holder
from fleetune.launch.size import ask_for
from fleetune.spec.errors import EXIT_DONE, UserError
from fleetune.spec.read import read_run
from fleetune.spec.run_folder import RunFolder

ABOUT = """Give a run that goes on more processes, or fewer. It saves after its current step and goes on from there: global
batch, learning rate and samples stay as they are, the micro-batches are shared out anew. A run that has stopped takes its
number of processes from --gpus beside --resume."""


def flags() -> Flags:
    return Flags(
        "resize",
        ABOUT,
        usage="RUN --gpus N",
        own=[option("--gpus", "Processes in all, from now on.", metavar="N")],
    )


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    folder = RunFolder(Path(one_word(typed, "run folder", "fleetune resize RUN --gpus 2")))
    asked = typed.own["gpus"]
    if asked is None or not str(asked).isdigit() or int(asked) < 1:
        raise UserError(
            f"--gpus {asked if asked is not None else ''} is no number of processes: give a whole number, at least 1"
        )
    if not folder.exists():
        raise UserError(f"{folder.path} is no run folder: give the folder of a run that goes on (runs/...)")
    holder = live_holder(folder)
    if holder is None:
        raise UserError(
            f"no run is live in {folder.path}: go on with fleetune train --run {folder.path} --resume --gpus {asked}"
        )
    choose_processes(read_run(folder).spec.layout.device, int(asked))
    ask_for(folder, int(asked))
    say(f"asked process {holder['pid']} on {holder['host']} to go on with {asked} processes: it saves after its current step")
    return EXIT_DONE
