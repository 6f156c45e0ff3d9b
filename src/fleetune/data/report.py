"""What the label audit found: plain numbers, for a person's table and for programs. Nothing is printed here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fleetune.data.documents import StoreOptions, is_held_out
from fleetune.data.rows_store import BAD_ROWS, TokenizedRows
from fleetune.data.store import TokenStore

#: Bad rows that are shown with the report; all of them are in quarantine.jsonl.
_SHOWN = 5
#: Below these shares something is said about it.
_FEW_ENDS = 0.99
_FEW_TRAINED = 0.05


@dataclass(frozen=True)
class FileReport:
    """One file: what was found in it. columns: role -> column."""

    id: str
    path: str
    format: str
    shape: str
    columns: dict[str, str]
    rows: int
    bad_rows: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class DataReport:
    """The rows of one store, and what became of them.

    rows, bad_rows: of all files; causes: cause -> bad rows; bad_examples: the first of them. held_out_rows: rows of the other
    side of --validation-share. lengths: [upper bound in tokens, rows (or their parts) up to it]. turns, turns_ended: the
    assistant's trained turns, and those whose end-of-turn token is trained. double_bos: rows with a second begin-of-text
    token, which was left out. rows_with_literals, literals: control tokens written out in rows; they are kept as text.
    rewritten: rows whose template writes earlier turns differently, one sample for each turn. over_long: rows longer than a
    sequence, and what is done with them. system: the system text that every conversation begins with, or "". tokens,
    trained_tokens, sequences, documents: of one epoch. efficiency: tokens / (sequences x sequence_length).
    notes: what is said otherwise than the chat template would. warnings: sentences.
    """

    files: tuple[FileReport, ...]
    passed_over: tuple[str, ...]
    rows: int
    bad_rows: int
    causes: dict[str, int]
    bad_examples: tuple[dict[str, Any], ...]
    held_out_rows: int
    lengths: list[list[int]]
    longest: int
    turns: int
    turns_ended: int
    double_bos: int
    rows_with_literals: int
    literals: int
    rewritten: int
    over_long: dict[str, Any]
    system: str
    sequence_length: int
    sequences: int
    documents: int
    tokens: int
    trained_tokens: int
    efficiency: float
    notes: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, with the shares worked out."""
        return {
            **asdict(self),
            "trained_share": self.trained_share,
            "ended_share": self.turns_ended / self.turns if self.turns else None,
        }


def make_report(store: TokenStore, options: StoreOptions) -> DataReport:
    """The report of a store, from what was counted when it was made."""
    rows = store.rows
    counted, packed = rows.manifest["report"], store.manifest["report"]
    held_out = held_out_rows(rows, options)
    values = {
        "files": tuple(
            FileReport(**{name: file[name] for name in FileReport.__dataclass_fields__}) for file in rows.manifest["files"]
        ),
        "passed_over": tuple(rows.manifest["passed_over"]),
        "rows": rows.num_rows,
        "bad_rows": sum(file["bad_rows"] for file in rows.manifest["files"]),
        "causes": counted["causes"],
        "bad_examples": tuple(itertools.islice(bad_rows(rows), _SHOWN)),
        "held_out_rows": rows.num_rows - held_out if options.held_out else held_out,
        "lengths": packed["lengths"],
        "longest": int(rows.parts["length"].max()) if len(rows.parts) else 0,
        "over_long": {
            "policy": options.over_long,
            "rows": packed["over_long"],
            **{
                name: packed[name]
                for name in ("dropped", "cut", "split", "pieces", "pieces_without_trained", "answers_cut_off")
            },
        },
        "sequence_length": store.sequence_length,
        "sequences": store.num_sequences,
        "documents": len(store.entries),
        "tokens": store.num_tokens,
        "trained_tokens": store.num_trained_tokens,
        "efficiency": store.num_tokens / (store.num_sequences * store.sequence_length),
        "notes": counted["notes"],
        "system": counted.get("system", ""),  # rows that an earlier version tokenised do not say it
    }
    copied = ("turns", "turns_ended", "double_bos", "rows_with_literals", "literals", "rewritten")
    report = DataReport(**values, **{name: counted[name] for name in copied}, warnings=())
    return DataReport(**{**vars(report), "warnings": tuple(_warnings(report, rows, packed))})


def held_out_rows(rows: TokenizedRows, options: StoreOptions) -> int:
    """How many rows `options` holds out."""
    if not options.held_out_share:
        return 0
    is_first = rows.parts["part"] <= 0  # once a row
    return int(is_held_out(rows.parts["ordinal"][is_first], rows, options).sum())


def bad_rows(rows: TokenizedRows) -> Iterator[dict[str, Any]]:
    """Rows that were set aside: {source, file, row, line, cause}, in reading order."""
    with open(rows.folder / BAD_ROWS, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _warnings(report: DataReport, rows: TokenizedRows, packed: dict[str, Any]) -> Iterator[str]:
    has_conversations = any(file.shape not in ("text", "") for file in report.files)
    if report.turns and report.turns_ended < _FEW_ENDS * report.turns and has_conversations:
        yield (
            f"only {report.turns_ended} of {report.turns} answers end with a trained end-of-turn token: the model will not "
            "learn to stop. Check the chat template"
        )
    if not rows.manifest["report"]["has_end_of_text"]:
        yield "the tokenizer has no end-of-text token: the model will not learn to stop"
    if 0 < report.trained_share < _FEW_TRAINED:
        yield f"only {report.trained_share:.1%} of the tokens are trained: the prompts are much longer than the answers"
    if packed["dropped"] or packed["answers_cut_off"]:
        lost = packed["dropped"] + packed["answers_cut_off"]
        yield (
            f"{lost} rows longer than sequence_length {report.sequence_length} are left out: give a larger --sequence-length, "
            "or --over-long split"
        )
    if report.rewritten:
        yield (
            f"the chat template writes earlier turns differently in {report.rewritten} rows: each of their answers is trained "
            "in its own sample"
        )
    if report.double_bos:
        yield f"the chat template begins {report.double_bos} rows with two begin-of-text tokens: the second was left out"
    if packed["not_drawn"]:
        yield f"{packed['not_drawn']} documents are in no epoch, because their source has a weight below 1"
    for file in report.files:
        if not file.rows and not file.bad_rows:
            yield f"{file.path} holds no rows"
