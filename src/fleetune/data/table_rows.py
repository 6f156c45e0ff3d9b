"""CSV, Parquet and Arrow tables, row by row."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetune.data.rows import MAX_ROW_BYTES, BadRow, DataFile, Row, listed
from fleetune.spec.errors import UserError

#: Rows that are turned into Python objects at once.
_BATCH_ROWS = 256
#: A row group that grows beyond this factor and size when it is unpacked is refused (a decompression bomb).
_MAX_GROWTH = 1000
_GROWTH_COUNTS_FROM = 1 << 30
#: What a torn table raises in Arrow's own code, beside its own kinds of error.
_FAULTS = (OSError, ValueError, LookupError, ArithmeticError, TypeError, SystemError, MemoryError)
_DELIMITERS = ",\t;|"


def read_csv_file(file: DataFile) -> Iterator[Row | BadRow]:
    """Rows of a .csv or .tsv file; the first row names the columns, and is searched for the delimiter."""
    path = file.parts[0]
    csv.field_size_limit(MAX_ROW_BYTES)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as handle:
        delimiter = _delimiter(path, handle.readline(1 << 16))
        handle.seek(0)
        reader = csv.reader(handle, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                _check_not_swallowed(path, str(error), line, reader.line_num)
                if header is None:
                    raise UserError(f"{path}: line {line}, which names the columns, is no CSV ({error}): mend it") from None
                yield BadRow(line, f"invalid CSV: {error}", line)
                continue
            if not values:
                continue
            if header is None:
                header = _header(path, values)
            else:
                yield _csv_row(line, header, values)


def _delimiter(path: Path, first_line: str) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    counts = {symbol: len(next(csv.reader([first_line], delimiter=symbol), [])) for symbol in _DELIMITERS}
    return max(_DELIMITERS, key=lambda symbol: counts[symbol])


def _header(path: Path, names: list[str]) -> list[str]:
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise UserError(f"{path} names the column {twice[0]!r} twice: rename one of them")
    return names


def _check_not_swallowed(path: Path, error: str, first_line: int, last_line: int) -> None:
    if "unexpected end of data" in error and last_line > first_line:
        raise UserError(
            f"{path}: a quote opened in the row that begins at line {first_line} is never closed, and swallows the "
            f"{last_line - first_line} lines after it: close it (a quote inside a quoted field is written twice)"
        )


def _csv_row(line: int, header: list[str], values: list[str]) -> Row | BadRow:
    if len(values) != len(header):
        return BadRow(line, f"the row has {len(values)} fields and the header names {len(header)}", line)
    for name, value in zip(header, values):
        if not value.isascii() and any("\udc80" <= symbol <= "\udcff" for symbol in value):
            return BadRow(line, f"the column {name!r} is not UTF-8", line)
    return Row(line, dict(zip(header, values)), line)


def read_parquet_file(file: DataFile) -> Iterator[Row | BadRow]:
    """Rows of a .parquet file. Columns of bytes are not read: they hold no text, and nothing in them is ever unpickled."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = file.parts[0]
    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            names = _text_columns(table.schema_arrow, path)
            packed = path.stat().st_size
            for group in range(table.num_row_groups):
                unpacked = table.metadata.row_group(group).total_byte_size
                if unpacked > _GROWTH_COUNTS_FROM and unpacked > packed * _MAX_GROWTH:
                    raise UserError(
                        f"{path}: row group {group} unpacks to {unpacked >> 20} MiB from {packed >> 10} KiB: refused"
                    )
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=names):
                yield from _batch_rows(batch, number)
                number += batch.num_rows
    except (arrow.ArrowException, *_FAULTS) as error:
        raise UserError(f"{path} cannot be read as Parquet after row {number}: {error}. Write it again") from error


def read_arrow_folder(file: DataFile) -> Iterator[Row | BadRow]:
    """Rows of Arrow files (`save_to_disk` of the datasets library), numbered across the files."""
    import pyarrow as arrow

    number = 0
    for path in file.parts:
        try:
            with arrow.memory_map(str(path)) as mapped:
                for batch in _arrow_batches(mapped):
                    batch = batch.select(_text_columns(batch.schema, path))
                    for start in range(0, batch.num_rows, _BATCH_ROWS):
                        yield from _batch_rows(batch.slice(start, _BATCH_ROWS), number + start)
                    number += batch.num_rows
        except (arrow.ArrowException, *_FAULTS) as error:
            raise UserError(f"{path} cannot be read as Arrow after row {number}: {error}. Write it again") from error


def _arrow_batches(mapped: Any) -> Iterator[Any]:
    """Record batches of the stream format (what datasets writes) or of the file format."""
    import pyarrow as arrow

    if mapped.read(6) == b"ARROW1":
        reader = arrow.ipc.open_file(mapped)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        return
    mapped.seek(0)
    yield from arrow.ipc.open_stream(mapped)


def _text_columns(schema: Any, path: Path) -> list[str]:
    """Names of the columns without bytes in them."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise UserError(f"{path} names the column {twice[0]!r} twice: rename one of them")
    names = [field.name for field in schema if "binary" not in str(field.type)]
    if not names:
        raise UserError(f"{path} holds only columns of bytes ({listed(schema.names)}), and no text to train on")
    return names


def _batch_rows(batch: Any, before: int) -> Iterator[Row | BadRow]:
    """Rows of one batch. It is checked first: bounds and characters in a file are whatever its writer put there."""
    import pyarrow as arrow

    faults = (arrow.ArrowException, *_FAULTS)
    try:
        batch.validate(full=True)
        rows = batch.to_pylist()
    except faults:
        for index in range(batch.num_rows):  # one value spoils the batch: find the row
            try:
                row = batch.slice(index, 1)
                row.validate(full=True)
                yield Row(before + index + 1, _plain(row.to_pylist()[0]))
            except faults as error:
                yield BadRow(before + index + 1, f"a value cannot be read: {error}")
        return
    for index, fields in enumerate(rows):
        yield Row(before + index + 1, _plain(fields))


def _plain(value: Any) -> Any:
    """A table gives every struct all keys of its column: those that a row does not have (null) are left out again."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value
