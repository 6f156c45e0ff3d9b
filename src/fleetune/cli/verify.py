"""`fleetune verify`: prove from its ledger what a run has trained."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fleetune.cli.flags import Flags, one_word, option, switch
from fleetune.cli.words import table
from fleetune.spec.errors import EXIT_CHECK_FAILED, EXIT_DONE, UserError
from fleetune.spec.run_folder import RunFolder

ABOUT = """Prove from its ledger that a run has trained each sample once and in its place: measured by its own plan, which is
made anew from data and seed, or by another run (--against), with how far the losses differ. Exit code 3 where it does not
hold."""


def flags() -> Flags:
    return Flags(
        "verify",
        ABOUT,
        usage="RUN [--against RUN] [FLAGS]",
        own=[
            option("--against", "Another run, for instance an uninterrupted one.", metavar="RUN"),
            switch("--bitwise", "Losses must be equal to the last bit (with --against)."),
            switch("--json", "Print the result as JSON."),
        ],
    )


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    folder = one_word(typed, "run folder", "fleetune verify RUN --against OTHER")
    against, bitwise = typed.own["against"], typed.own["bitwise"]
    if bitwise and against is None:
        raise UserError("--bitwise compares losses with another run's: give --against RUN")
    from fleetune.monitor.account import account_of, account_rows
    from fleetune.training.verify import verify_run

    found = verify_run(folder, against=against)
    account = account_of(RunFolder(Path(folder)))
    holds = found.holds and (not bitwise or bool(getattr(found, "bitwise", False)))
    if typed.own["json"]:
        values = {name: None if _is_endless(value) else value for name, value in asdict(found).items()}
        print(json.dumps({"holds": holds, **values, "account": account.to_json()}))
    else:
        print(found.text())
        for line in table(account_rows(account.to_json())) if account.is_eventful else ():
            print(line)
    return EXIT_DONE if holds else EXIT_CHECK_FAILED


def _is_endless(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
