"""xTuring's data sets: rows of instruction, text and target, or of text; from a file, a folder, a dict or a data set object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from fleetune.bridges.given_rows import write_rows
from fleetune.data.read import read_rows
from fleetune.data.rows import Row
from fleetune.data.sources import find_files
from fleetune.spec.errors import UserError


class InstructionDataset:
    """Rows of `instruction`, `text` and `target`.

    rows: a path (.jsonl, .json, .csv, .parquet, a folder, one of `save_to_disk`), a dict of columns, a list of rows, or an
    object of the datasets library. infix_instruction: the instruction holds `{text}` and `{target}`, which are put in their
    places. promt_template: a text with `{instruction}` and `{text}`, instead of the model's own way to write a task; the name
    is spelt as in xTuring.
    """

    def __init__(self, rows: Any, infix_instruction: bool = False, promt_template: str | None = None) -> None:
        if infix_instruction and promt_template is not None:
            raise UserError("infix_instruction and promt_template both say how a task is written: give one of them")
        if promt_template is not None and "{instruction}" not in promt_template:
            raise UserError(f"promt_template {promt_template!r} has no place for the {{instruction}}: write one")
        is_rewritten = infix_instruction or promt_template is not None
        _check(_first(rows), ("instruction", "text", "target"))
        if is_rewritten:
            write = _infixed if infix_instruction else (lambda row: _templated(row, str(promt_template)))
            self.path = write_rows(write(row) for row in every_row(rows))
            self.columns = {"prompt": "prompt", "response": "response"}
        else:
            self.path = _path(rows)
            self.columns = {"prompt": "instruction", "input": "text", "response": "target"}

    def fields(self) -> dict[str, Any]:
        """The fields of a run that these rows are."""
        return {"data": self.path, "columns": self.columns}


class TextDataset:
    """Rows of `text`, and `target` where a text has an answer to be trained."""

    def __init__(self, rows: Any) -> None:
        first = _first(rows)
        _check(first, ("text",))
        self.columns = {"prompt": "text", "response": "target"} if "target" in first else {"text": "text"}
        self.path = _path(rows)

    def fields(self) -> dict[str, Any]:
        """The fields of a run that these rows are."""
        return {"data": self.path, "columns": self.columns}


def fields_of(dataset: Any) -> dict[str, Any]:
    """The fields of a run for whatever `finetune` and `evaluate` are given: one of the sets above, a path, or rows."""
    if isinstance(dataset, (InstructionDataset, TextDataset)):
        return dataset.fields()
    return {"data": _path(dataset)}


def _infixed(row: Mapping[str, Any]) -> dict[str, str]:
    """The instruction with the text in its place, up to where the target stands; the answer is the rest."""
    before, _, after = str(row["instruction"]).partition("{target}")
    text = str(row["text"] or "")
    return {"prompt": before.replace("{text}", text), "response": f"{row['target']}{after.replace('{text}', text)}"}


def _templated(row: Mapping[str, Any], template: str) -> dict[str, str]:
    prompt = template.replace("{instruction}", str(row["instruction"])).replace("{text}", str(row["text"] or ""))
    return {"prompt": prompt, "response": str(row["target"])}


def _path(rows: Any) -> str:
    """Where rows lie: their own path, or a file in fleetune's cache that is named by its content."""
    if isinstance(rows, (str, os.PathLike)):
        return os.fspath(rows)
    return write_rows(every_row(rows))


def every_row(rows: Any) -> Iterator[Mapping[str, Any]]:
    """Every row, whatever holds them."""
    if isinstance(rows, (str, os.PathLike)):
        for file in find_files([os.fspath(rows)], offline=True).files:
            for row in read_rows(file):
                if isinstance(row, Row):
                    yield row.fields
    elif isinstance(rows, Mapping):
        yield from _of_columns(rows)
    elif hasattr(rows, "keys") and "train" in rows.keys():  # noqa: SIM118 (a DatasetDict need not be a Mapping)
        yield from rows["train"]
    else:
        yield from rows


def _of_columns(columns: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rows of a dict of columns, or of a dict of splits."""
    if "train" in columns and not isinstance(columns["train"], list):
        yield from every_row(columns["train"])
        return
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"the columns differ in length: {lengths}. Give each a value in every row")
    yield from (dict(zip(columns, values)) for values in zip(*columns.values()))


def _first(rows: Any) -> Mapping[str, Any]:
    for row in every_row(rows):
        return row
    raise UserError("the data set has no row: give rows")


def _check(row: Mapping[str, Any], wanted: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in row]
    if missing:
        raise UserError(
            f"the rows have the columns {', '.join(row)} and lack {', '.join(missing)}: rename yours, or give the path itself "
            "to finetune, which finds other shapes by looking"
        )
