"""`fleetune export`: the result of a run for other programs, checked before it is published."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from fleetune.cli.flags import Flags, one_word, option, switch
from fleetune.cli.reading import read_spec, start_logging
from fleetune.cli.words import table
from fleetune.spec.errors import EXIT_DONE, UserError

ABOUT = """Write the result of a run for other programs: the adapter (for PEFT), or the model with the adapter merged into it
(for transformers). What was written is loaded by those libraries and its output compared with the trained model's; where
it differs nothing is published, and the exit code is 3."""


def flags() -> Flags:
    return Flags(
        "export",
        ABOUT,
        usage="RUN --to adapter|merged [FLAGS]",
        fields=("log_level",),
        own=[
            option("--to", "What to write.", type=click.Choice(["adapter", "merged"]), metavar="adapter|merged"),
            option(
                "--precision",
                "Of the weights; else the run's (fp32 after full fine-tuning). Merged in fp32, the model is the trained one to "
                "the last digits.",
                type=click.Choice(["fp32", "bf16", "fp16"]),
                metavar="fp32|bf16|fp16",
            ),
            option("--out", "Folder to write; else export/ in the run folder.", metavar="DIR"),
            switch("--json", "Print the report as JSON."),
        ],
    )


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    folder = one_word(typed, "run folder", "fleetune export RUN --to merged")
    if typed.own["to"] is None:
        raise UserError("it is not said what to export: give --to adapter or --to merged")
    start_logging(read_spec(typed, folder, required=()))
    from fleetune.training.export import export_run

    out = typed.own["out"]
    target = Path(out).expanduser() if out else None
    report = export_run(folder, to=typed.own["to"], out=target, precision=typed.own["precision"])
    values = {name: os.fspath(value) if isinstance(value, Path) else value for name, value in vars(report).items()}
    if typed.own["json"]:
        print(json.dumps(values))
    else:
        rows = [
            (report.kind, str(report.path)),
            ("checked with", f"{report.checked_with}, on {report.rows} rows"),
            ("divergence", f"{report.divergence:.2g} nats a token in {report.precision} (allowed: {report.tolerance:g})"),
            ("largest difference", f"{report.max_difference:.2g} nats of a next token's log-probability"),
        ]
        print("\n".join(table(rows)))
    return EXIT_DONE
