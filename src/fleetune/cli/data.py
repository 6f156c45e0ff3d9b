"""`fleetune data inspect` and `preview`: what is in the rows, what is trained, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from fleetune.cli.flags import Flags, Typed, option
from fleetune.cli.look import look_at_data
from fleetune.cli.reading import MODEL_FIELDS, ROW_FIELDS, device_of, read_spec, start_logging
from fleetune.cli.words import say
from fleetune.spec.errors import EXIT_CHECK_FAILED, EXIT_DONE, UserError
from fleetune.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from fleetune.data.preview import Example
    from fleetune.data.request import PreparedData

VERBS = {
    "inspect": """Read all rows as a training run would, and tell what was found: their shape, counts and lengths, what is
trained and what is not, whether answers end, rows that are too long or cannot be used, and an example. Exit code 3 where a
training run would refuse them.""",
    "preview": """Show rows as a training run would see them, with the part that is trained marked.""",
}
FIELDS = ("model", *ROW_FIELDS, "packing", "over_long", "max_bad_share", *MODEL_FIELDS, "json_output")


def flags(verb: str) -> Flags:
    return Flags(
        f"data {verb}",
        VERBS[verb],
        usage="DATA --model MODEL [FLAGS]",
        fields=FIELDS,
        own=[
            option("--first", "Number of the first row to show, from 0.", type=click.IntRange(min=0), default=0, metavar="N"),
            option("--count", "How many rows to show.", type=click.IntRange(min=0), metavar="N"),
        ],
    )


def run(words: Sequence[str]) -> int:
    verb = words[0] if words else ""
    if verb in ("", "-h", "--help"):
        print("usage: fleetune data inspect|preview DATA --model MODEL [FLAGS]\n\nfleetune data inspect --help tells the flags")
        return EXIT_DONE
    if verb not in VERBS:
        raise UserError(f"fleetune data has no {verb!r}: write fleetune data inspect or fleetune data preview")
    typed = flags(verb).read(words[1:])
    return EXIT_DONE if typed is None else _run(verb, typed)


def _run(verb: str, typed: Typed) -> int:
    if not typed.words:
        raise UserError(f"no data is given: fleetune data {verb} DATA --model MODEL")
    model = str(typed.fields.get("model") or "")
    given = replace(typed, fields={**typed.fields, "data": tuple(typed.words)})
    spec = read_spec(given, model, required=("model", "data"))
    look_at_data(spec.rows, offline=spec.weights.offline)
    start_logging(spec)
    prepared, tokenizer, refusals = audited(spec)
    count = typed.own["count"] if typed.own["count"] is not None else (1 if verb == "inspect" else 3)
    examples = [] if prepared is None else shown_examples(prepared, tokenizer, typed.own["first"], count)
    report = prepared.report.to_json() if prepared is not None and verb == "inspect" else None
    if spec.output.json_output:
        print(json.dumps(_as_json(report, examples, refusals), ensure_ascii=False))
    else:
        _show(prepared if verb == "inspect" else None, examples)
    for refusal in refusals:
        say(f"refused: {refusal}")
    return EXIT_CHECK_FAILED if refusals else EXIT_DONE


def audited(spec: RunSpec) -> tuple[PreparedData | None, Any, list[str]]:
    """(the rows as a run would read them, the model's tokenizer, why a run would refuse them).

    Bad rows are counted here, whatever share of them a run accepts, so that the report is seen. None: no row is left.
    """
    from fleetune.data.prepare import prepare_data
    from fleetune.data.request import DataRequest
    from fleetune.training.prepare import model_request
    from fleetune.training.sources import prepare_source, rows_fingerprint, tokenizer_of

    request = model_request(spec)
    source = prepare_source(replace(request, quantize="none"), device=device_of(spec))
    asked = DataRequest.of_rows(
        spec.rows.model_copy(update={"max_bad_share": 1.0}),
        tokenizer_fingerprint=rows_fingerprint(source, request),
        seed=spec.optimization.seed,
        offline=spec.weights.offline,
    )
    tokenizer = tokenizer_of(source, request)
    try:
        prepared = prepare_data(asked, lambda: tokenizer)
    except UserError as error:
        return None, tokenizer, list(error.problems)
    report, allowed = prepared.report, spec.rows.max_bad_share
    total = report.rows + report.bad_rows
    refusals = []
    if report.bad_rows > allowed * total:
        refusals.append(
            f"{report.bad_rows} of {total} rows cannot be used, more than max_bad_share {allowed} allows: mend them, or give "
            "--max-bad-share"
        )
    return prepared, tokenizer, refusals


def shown_examples(prepared: PreparedData, tokenizer: Any, first: int, count: int) -> list[Example]:
    """Documents `first` and on, in reading order. Raises UserError where there are not so many."""
    from fleetune.data.preview import example
    from fleetune.data.store import TokenStore

    store = TokenStore.open(prepared.store)
    if count and first >= store.num_documents:
        raise UserError(f"--first {first} and there are {store.num_documents} rows to show: give a smaller one")
    return [example(store, tokenizer, index) for index in range(first, min(first + count, store.num_documents))]


def _as_json(report: dict[str, Any] | None, examples: Sequence[Example], refusals: Sequence[str]) -> dict[str, Any]:
    shown = [{"sample": one.sample, "segments": [vars(segment) for segment in one.segments]} for one in examples]
    return {**(report or {}), "examples": shown, "refused": list(refusals)}


def _show(prepared: PreparedData | None, examples: Sequence[Example]) -> None:
    from fleetune.cli.data_report import print_examples, print_report

    if prepared is not None:
        print_report(prepared.report)
    print_examples(examples)
