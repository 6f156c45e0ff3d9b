"""`fleetune evaluate`: loss, perplexity and exact match of a model on rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from fleetune.cli.flags import Flags, one_word, option
from fleetune.cli.look import look_at_data
from fleetune.cli.reading import MODEL_FIELDS, ROW_FIELDS, device_of, read_spec, start_logging
from fleetune.cli.words import table
from fleetune.spec.errors import EXIT_DONE
from fleetune.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from fleetune.training.assess import Assessment

ABOUT = """Tell how good a model is on rows: loss over trained tokens, perplexity, and with --exact-match the share of answers
that are right to the letter (the model answers each row, to the end of its turn).

MODEL is anything that --model of train takes: a run folder is its result."""


def flags() -> Flags:
    return Flags(
        "evaluate",
        ABOUT,
        usage="MODEL --data DATA [FLAGS]",
        fields=("data", *ROW_FIELDS, "exact_match", "max_new_tokens", *MODEL_FIELDS, "json_output"),
        own=[option("--max-rows", "Only the first N rows.", type=click.IntRange(min=1), metavar="N")],
    )


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    model = one_word(typed, "model", "fleetune evaluate MODEL --data DATA")
    spec = read_spec(typed, model, required=("model", "data"))
    look_at_data(spec.rows, offline=spec.weights.offline)
    start_logging(spec)
    found = evaluated(spec, max_rows=typed.own["max_rows"])
    if spec.output.json_output:
        print(json.dumps(asdict(found)))
    else:
        print("\n".join(table(rows_of(found))))
    return EXIT_DONE


def evaluated(spec: RunSpec, *, max_rows: int | None = None) -> Assessment:
    """Evaluate `spec.weights.model` on `spec.rows.data`, in this process. Raises UserError."""
    from fleetune.training.evaluation import EvaluateOptions, evaluate_model

    options = EvaluateOptions(
        max_rows=max_rows,
        exact_match=spec.output.exact_match,
        max_new_tokens=spec.output.max_new_tokens,
        sequence_length=spec.rows.sequence_length,
        train_on=spec.rows.train_on,
        data_shape=spec.rows.data_shape,
        columns=dict(spec.rows.columns),
        revision=spec.weights.revision,
        precision=spec.weights.precision,
        chat_template=spec.weights.chat_template,
        offline=spec.weights.offline,
        allow_remote_code=spec.weights.allow_remote_code,
        device=device_of(spec),
        threads=spec.layout.threads,
    )
    return evaluate_model(spec.weights.model, spec.rows.data, options=options)


def rows_of(found: Assessment) -> list[tuple[str, str]]:
    from fleetune.monitor.figures import count, number, share

    rows = [("loss", number(found.loss)), ("perplexity", number(found.perplexity, 2))]
    if found.exact_match is not None:
        rows.append(("exact match", share(found.exact_match)))
    return [*rows, ("rows", count(found.rows)), ("trained tokens", count(found.trained_tokens))]
