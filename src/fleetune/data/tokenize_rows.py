"""Rows in, tokens out: reads every file, renders and tokenises its rows in batches, and sets bad ones aside."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fleetune.data.chat_format import NOTES, ChatFormat
from fleetune.data.conversations import Conversation, Text, read_row
from fleetune.data.encode import Encoded, Encoder
from fleetune.data.literals import Rendered, restore
from fleetune.data.read import read_rows
from fleetune.data.request import DataRequest
from fleetune.data.rows import BadRow, DataFile, Row
from fleetune.data.rows_store import BAD_ROWS, RowWriter
from fleetune.data.sandbox import Refused
from fleetune.data.shapes import ROWS_LOOKED_AT, Shape, find_shape
from fleetune.data.sources import Found
from fleetune.spec.errors import UserError, raise_if_any

#: Rows that are tokenised at once, and characters after which a batch is closed early.
BATCH_ROWS = 512
BATCH_CHARACTERS = 4 << 20


@dataclass
class RowCounts:
    """What the label audit counts; in rows, except turns and tokens."""

    tokens: int = 0
    trained_tokens: int = 0
    parts: int = 0
    turns: int = 0
    turns_ended: int = 0
    double_bos: int = 0
    rows_with_literals: int = 0
    literals: int = 0
    rewritten: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    notes: set[str] = field(default_factory=set)
    systems: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Prepared:
    """A row on its way: its parts, still as text. literals: how many control tokens it writes out."""

    row: Row
    parts: list[Rendered] | Text
    literals: int


class RowTokenizer:
    """Tokenises the rows of files into one folder of tokenised rows."""

    def __init__(self, tokenizer: Any, request: DataRequest, progress: Callable[[int], None] | None = None) -> None:
        self.encoder = Encoder(tokenizer)
        self.format: ChatFormat = self.encoder.chat_format(tokenizer)
        self.request = request
        self.counts = RowCounts()
        self.progress = progress

    def write(self, found: Found, folder: Path) -> None:
        """Tokenise all files into `folder`. Raises UserError with the problems of all files."""
        files: list[dict[str, Any]] = []
        problems: list[str] = []
        with RowWriter(folder) as writer, open(folder / BAD_ROWS, "x", encoding="utf-8") as bad:
            for number, file in enumerate(found.files):
                try:
                    files.append(self._write_file(file, number, writer, bad))
                except UserError as error:
                    problems += error.problems
            raise_if_any(problems)
            bad.flush()
            writer.finish({"files": files, "passed_over": list(found.passed_over), "report": self._report()})

    def _write_file(self, file: DataFile, number: int, writer: RowWriter, bad: TextIO) -> dict[str, Any]:
        rows = read_rows(file)
        head: list[Row | BadRow] = []
        usable: list[dict[str, Any]] = []
        for row in rows:
            head.append(row)
            if isinstance(row, Row):
                usable.append(row.fields)
            if usable and len(head) >= ROWS_LOOKED_AT:
                break
        shape = self._shape(file, usable)
        good = broken = tokens = trained = 0
        for batch in self._batches(itertools.chain(head, rows), shape):
            if self.progress:
                self.progress(writer.num_rows)
            for origin, encoded in self._encode(batch):
                if isinstance(encoded, BadRow):
                    broken += 1
                    self._note_bad(file, encoded, bad)
                    continue
                writer.add_row([(part.tokens, part.trained) for part in encoded], file=number, number=origin.number)
                good += 1
                tokens += sum(len(part.tokens) for part in encoded)
                trained += sum(int(part.trained.sum()) for part in encoded)
        self.counts.tokens += tokens
        self.counts.trained_tokens += trained
        return {
            "id": file.id,
            "path": str(file.path),
            "source": file.source,
            "format": file.format,
            "shape": shape.name if shape else "",
            "columns": dict(shape.columns) if shape else {},
            "rows": good,
            "bad_rows": broken,
            "tokens": tokens,
            "trained_tokens": trained,
        }

    def _shape(self, file: DataFile, usable: list[dict[str, Any]]) -> Shape | None:
        if file.format == "text":
            if self.request.data_shape not in ("auto", "text"):
                raise UserError(
                    f"{file.path} holds plain text, and --data-shape asks for {self.request.data_shape}: leave it out"
                )
            return Shape("text", {"text": "text"})
        if not usable:
            return None
        return find_shape(usable, forced=self.request.data_shape, mapped=self.request.columns, where=str(file.path))

    def _batches(self, rows: Iterator[Row | BadRow], shape: Shape | None) -> Iterator[list[Prepared | BadRow]]:
        batch: list[Prepared | BadRow] = []
        size = 0
        for row in rows:
            prepared = self._prepare(row, shape)
            batch.append(prepared)
            if isinstance(prepared, Prepared):
                parts = prepared.parts
                size += len(parts.text) if isinstance(parts, Text) else sum(len(part.text) for part in parts)
            if len(batch) >= BATCH_ROWS or size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _prepare(self, row: Row | BadRow, shape: Shape | None) -> Prepared | BadRow:
        """One row as rendered text, or as a bad row with its cause."""
        if isinstance(row, BadRow):
            return row
        assert shape is not None
        try:
            found = read_row(row.fields, shape)
            if isinstance(found, Text):
                return Prepared(row, found, self.encoder.literals.count(found.text))
            return self._rendered(row, found)
        except RecursionError:
            return BadRow(row.number, "the row is nested too deeply", row.line)
        except ValueError as error:
            return BadRow(row.number, str(error), row.line)

    def _rendered(self, row: Row, conversation: Conversation) -> Prepared | BadRow:
        self.counts.notes |= self.format.notes(conversation)
        if len(self.counts.systems) < 2:  # two that differ are enough to know
            self.counts.systems.add(conversation.system)
        hidden, literals = self.encoder.literals.hide(conversation)
        parts = self.format.parts(hidden, train_all=self.request.train_on == "all")
        return Prepared(row, [restore(part, literals) for part in parts], len(literals))

    def _encode(self, batch: list[Prepared | BadRow]) -> Iterator[tuple[Row | BadRow, list[Encoded] | BadRow]]:
        """The tokens of each row of the batch, in order."""
        texts = [row.parts.text for row in batch if isinstance(row, Prepared) and isinstance(row.parts, Text)]
        encoded_texts = iter(self.encoder.encode_texts(texts)) if texts else iter(())
        rendered = [part for row in batch if isinstance(row, Prepared) and isinstance(row.parts, list) for part in row.parts]
        encoded_parts = iter(self.encoder.encode(rendered)) if rendered else iter(())
        for row in batch:
            if isinstance(row, BadRow):
                yield row, row
                continue
            if isinstance(row.parts, Text):
                parts: list[Encoded | Refused] = [next(encoded_texts)]
            else:
                parts = [next(encoded_parts) for _ in row.parts]
            yield row.row, self._checked(row, parts)

    def _checked(self, row: Prepared, parts: list[Encoded | Refused]) -> list[Encoded] | BadRow:
        """The parts that have something to learn, counted; a row without any is a bad row."""
        refused = next((part for part in parts if isinstance(part, Refused)), None)
        if refused:
            return BadRow(row.row.number, str(refused), row.row.line)
        kept = [part for part in parts if isinstance(part, Encoded) and part.trained.any()]
        if not kept:
            cause = "the text is too short" if isinstance(row.parts, Text) else "the chat template leaves the answer out"
            return BadRow(row.row.number, f"has no trained token: {cause}", row.row.line)
        counts = self.counts
        counts.parts += len(kept)
        counts.turns += sum(part.turns for part in kept)
        counts.turns_ended += sum(part.ended for part in kept)
        counts.notes |= {"end"} if any(part.end_added for part in kept) else set()
        counts.double_bos += any(part.double_bos for part in kept)
        counts.rows_with_literals += row.literals > 0
        counts.literals += row.literals
        counts.rewritten += len(parts) > 1
        return kept

    def _note_bad(self, file: DataFile, row: BadRow, bad: TextIO) -> None:
        self.counts.causes[_kind_of_cause(row.cause)] += 1
        entry = {"source": file.id, "file": str(file.path), "row": row.number, "line": row.line, "cause": row.cause}
        bad.write(json.dumps(entry, ensure_ascii=True) + "\n")

    def _report(self) -> dict[str, Any]:
        counts = {name: value for name, value in vars(self.counts).items() if name not in ("causes", "notes", "systems")}
        return {
            **counts,
            "causes": dict(self.counts.causes.most_common()),
            "notes": {name: note for name, note in NOTES.items() if name in self.counts.notes},
            "has_end_of_text": self.encoder.eos is not None,
            "system": next(iter(self.counts.systems)) if len(self.counts.systems) == 1 else "",
        }


def _kind_of_cause(cause: str) -> str:
    """A cause without what differs from row to row, so that causes can be counted."""
    return re.sub(r"\d+", "N", re.sub(r"0x[0-9a-f]+", "0x…", cause))
