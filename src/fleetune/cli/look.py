"""A first look at data files, before anything is written: are they there, and do their rows have a shape?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fleetune.data.read import read_rows
from fleetune.data.rows import BadRow, DataFile, Row
from fleetune.data.shapes import ROWS_LOOKED_AT, check_columns, find_shape
from fleetune.data.sources import find_files
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.run_spec import RowsSection


def look_at_data(rows: RowsSection, *, offline: bool) -> None:
    """Raise one UserError with everything that the first rows of all files already show. Needs no tokenizer and no torch."""
    problems = check_columns(rows.columns)
    for names in (rows.data, rows.validation):
        try:
            problems += _problems(names, rows, offline=offline) if names else []
        except UserError as error:
            problems += error.problems
    raise_if_any(problems)


def _problems(names: Sequence[str], rows: RowsSection, *, offline: bool) -> list[str]:
    problems: list[str] = []
    for file in find_files(names, offline=offline).files:
        try:
            _look(file, rows)
        except UserError as error:
            problems += error.problems
    return problems


def _look(file: DataFile, rows: RowsSection) -> None:
    """Raises UserError where no row of the file can be used, as far as its beginning tells."""
    if file.format == "text":
        next(iter(read_rows(file)), None)  # its encoding, and whether it can be opened
        return
    usable: list[Row] = []
    bad: list[BadRow] = []
    reader = read_rows(file)
    for row in itertools.islice(reader, ROWS_LOOKED_AT):
        usable.append(row) if isinstance(row, Row) else bad.append(row)
    if usable:
        find_shape([row.fields for row in usable], forced=rows.data_shape, mapped=rows.columns, where=str(file.path))
    elif bad and next(reader, None) is None:
        where = f"line {bad[0].line}" if bad[0].line else f"row {bad[0].number}"
        raise UserError(f"{file.path}: none of its {len(bad)} rows can be used ({where}: {bad[0].cause}): mend the file")
    elif not bad:
        raise UserError(f"{file.path}: there is no row in it. Give a file with rows")
