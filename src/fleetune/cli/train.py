"""`fleetune train`: train, or go on with a run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fleetune.cli.flags import Flags
from fleetune.cli.intent import Intent, work_out
from fleetune.cli.machines import LedElsewhere
from fleetune.cli.smoke import Trial, smoke
from fleetune.cli.start import Finished, start
from fleetune.cli.torchrun import is_first, is_foreign, start_as_rank
from fleetune.cli.words import say, table
from fleetune.monitor.account import account_of, account_rows
from fleetune.monitor.summary import print_summary
from fleetune.planning.explain import explain
from fleetune.spec.declared import declared
from fleetune.spec.errors import EXIT_DONE, UserError

ABOUT = """Fine-tune a model on rows of data, or go on with a run (--resume).

RUN.yaml holds settings by the names of the flags, without the dashes; the run.yaml of another run is one too. A flag wins
over the environment (FLEETUNE_LEARNING_RATE=1e-4), which wins over the file, which wins over the model's preset."""


def flags() -> Flags:
    return Flags("train", ABOUT, usage="[RUN.yaml] --model MODEL --data DATA [FLAGS]", fields=declared())


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    if is_foreign(os.environ):
        finished = start_as_rank(typed.source(), file_of(typed.words), tell=say, show=tell_intent)
        if finished.exit_code == EXIT_DONE and is_first():
            print_summary(finished.summary(), stream=sys.stdout)
        return finished.exit_code
    try:
        intent = work_out(typed.source(), file_of(typed.words))
    except LedElsewhere as elsewhere:
        say(str(elsewhere))
        return EXIT_DONE
    is_quiet = intent.spec.output.log_level in ("warning", "error")
    if not is_quiet:
        tell_intent(intent)
    if intent.spec.output.smoke:
        return tell_trial(smoke(intent, tell=say), as_json=intent.spec.output.json_output)
    finished = start(intent, tell=say)
    if finished.exit_code == EXIT_DONE:
        tell_result(finished, as_json=intent.spec.output.json_output)
        if not is_quiet:
            tell_next(finished)
    elif not is_quiet:
        tell_account(finished)
    return finished.exit_code


def file_of(words: Sequence[str]) -> Path | None:
    """The RUN.yaml among the positional words, if any."""
    if len(words) > 1:
        raise UserError(f"{' '.join(words)}: one RUN.yaml is read, and flags begin with --: see fleetune train --help")
    return Path(words[0]) if words else None


def tell_intent(intent: Intent) -> None:
    """What will be done, before it is done."""
    located = ("from", intent.located.source)
    first, *rest = explain(intent.plan)
    notes = [("note", note) for note in intent.notes]
    for line in table([first, located, *rest, *notes]):
        say(line)


def tell_result(finished: Finished, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(finished.summary(), ensure_ascii=False))
    else:
        print_summary(finished.summary(), stream=sys.stdout)


def tell_trial(trial: Trial, *, as_json: bool) -> int:
    if trial.exit_code == EXIT_DONE:
        print(json.dumps(trial.figures) if as_json else "\n".join(table(trial.rows)))
    return trial.exit_code


def tell_account(finished: Finished) -> None:
    """What failures have cost a run that did not come to its end."""
    account = account_of(finished.folder)
    if account.is_eventful:
        for line in table(account_rows(account.to_json())):
            say(line)


def tell_next(finished: Finished) -> None:
    """What a person may type now."""
    from fleetune.training.prepared import Prepared

    folder = finished.folder.path
    here = Path.cwd()
    name = shlex.quote(str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder))
    say("")
    system = Prepared.read(finished.folder).system
    asked = f" --system {shlex.quote(system)}" if system else ""  # it learned to reply behind this text
    say(f'ask it:    fleetune generate {name}{asked} "..."')
    say(f"export it: fleetune export {name} --to merged")
