"""JSON files, row by row: lines of objects, an array of objects, or one object of columns. Found by looking, not by name.

A broken row is told with its line and set aside. Where the end of a broken row cannot be known (an array that never
closes), nobody can say how many rows are lost, and that is an error.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetune.data.rows import MAX_ROW_BYTES, BadRow, DataFile, Row, decoded, spoken_type
from fleetune.spec.errors import UserError

#: A file that is one object must be parsed as a whole; larger ones must be lines or an array.
MAX_OBJECT_BYTES = 1 << 30
#: Keys under which a file that is one object keeps its list of rows.
ROW_LISTS = ("data", "rows", "train", "examples", "instances")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE_TEXT = re.compile(rb'["\\]')


def read_json_file(file: DataFile) -> Iterator[Row | BadRow]:
    """Rows of a .json or .jsonl file, whichever of the three forms it has."""
    path = file.parts[0]
    if path.stat().st_size == 0:
        return
    with open(path, "rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 3 if data[:3] == _BYTE_ORDER_MARK else 0
        start = _skip_blank(data, start)
        is_lines = path.suffix.lower() != ".json"
        opening = data[start : start + 1]
        kind = _kind_of_first_line(data, start)
        if opening == b"[" and kind is not list:
            yield from _array(data, start, path)
        elif is_lines or kind is dict:
            yield from read_json_lines(path)
        elif opening == b"{":
            yield from _object(data, start, path)
        elif opening:
            raise UserError(
                f"{path} is not JSON rows: it begins with {data[start : start + 20]!r}, where [ or {{ was expected. Give a "
                "JSON array of objects, one object a line, or name it .txt if it is plain text"
            )


def parse_object(text: str) -> dict[str, Any]:
    """One row; ValueError with the cause where it is none."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"the row is {spoken_type(value)}, not an object with columns")
    return value


def parse_json(text: str) -> Any:
    """Strict JSON. A key given twice is refused (one value would be lost); NaN, as pandas writes for missing, is null."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"invalid JSON: {error.msg} ({where} of the row)") from None
    except RecursionError:
        raise ValueError("the row is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return found


def lines_of(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """(line number from 1, bytes without the line end) of each line; None for a line over `MAX_ROW_BYTES`."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
                continue
            if number == 1 and line.startswith(_BYTE_ORDER_MARK):
                line = line[3:]
            yield number, line.rstrip(b"\r\n")


def too_large() -> str:
    return f"the row is larger than {MAX_ROW_BYTES >> 20} MiB"


def read_json_lines(path: Path) -> Iterator[Row | BadRow]:
    """One object a line; blank lines are skipped."""
    for number, line in lines_of(path):
        if line is None:
            yield BadRow(number, too_large(), number)
        elif line.strip():
            yield _row(number, line, number)


def _row(number: int, data: bytes, line: int) -> Row | BadRow:
    try:
        return Row(number, parse_object(decoded(data)), line)
    except ValueError as error:
        return BadRow(number, str(error), line)


def _skip_blank(data: mmap.mmap, start: int) -> int:
    found = re.compile(rb"[^ \t\r\n]").search(data, start)
    return found.start() if found else len(data)


def _kind_of_first_line(data: mmap.mmap, start: int) -> type | None:
    """dict, list, ... where the line at `start` is one whole JSON value and others follow it; None otherwise."""
    end = data.find(b"\n", start, start + MAX_ROW_BYTES)
    if end < 0 or _skip_blank(data, end) == len(data):
        return None
    try:
        return type(json.loads(data[start:end]))
    except (ValueError, RecursionError):
        return None


def _array(data: mmap.mmap, start: int, path: Path) -> Iterator[Row | BadRow]:
    """Elements of the array at `start`, each parsed by itself: a broken one does not spoil the next."""
    line, counted = 1, 0
    for number, (begin, end) in enumerate(_elements(data, start, path), start=1):
        begin = min(_skip_blank(data, begin), end)
        line += data[counted:begin].count(b"\n")
        counted = begin
        if end - begin > MAX_ROW_BYTES:
            yield BadRow(number, too_large(), line)
        elif not data[begin:end].strip():
            yield BadRow(number, "invalid JSON: a comma without a value", line)
        else:
            yield _row(number, data[begin:end], line)


def _elements(data: mmap.mmap, start: int, path: Path) -> Iterator[tuple[int, int]]:
    """Byte ranges between the commas of the array that opens at `start`, by counting brackets outside of strings."""
    closing = {b"[": b"]", b"{": b"}"}
    open_brackets: list[bytes] = []
    begin = position = start
    while True:
        found = _OUTSIDE.search(data, position)
        if found is None:
            raise _unclosed(data, begin, path)
        symbol, position = found.group(), found.end()
        if symbol == b'"':
            position = _end_of_text(data, position)
            if position < 0:
                raise _unclosed(data, begin, path)
        elif symbol in closing:
            open_brackets.append(closing[symbol])
            if len(open_brackets) == 1:
                begin = position
        elif symbol == b",":
            if len(open_brackets) == 1:
                yield begin, found.start()
                begin = position
        elif open_brackets.pop() != symbol:
            raise UserError(
                f"{path}: line {_line(data, found.start())} closes with {symbol.decode()} what was opened otherwise, so the "
                "rows from there on cannot be told apart: mend that line"
            )
        elif not open_brackets:
            if begin > start + 1 or data[begin : found.start()].strip():
                yield begin, found.start()
            break
    after = _skip_blank(data, position)
    if after != len(data):
        raise UserError(f"{path}: line {_line(data, after)} has text after the end of the array: remove it, or mend the array")


def _end_of_text(data: mmap.mmap, position: int) -> int:
    """The position after the closing quote of a string that began before `position`; -1 where there is none."""
    while found := _INSIDE_TEXT.search(data, position):
        if found.group() == b'"':
            return found.end()
        position = found.end() + 1
    return -1


def _line(data: mmap.mmap, position: int) -> int:
    return data[:position].count(b"\n") + 1


def _unclosed(data: mmap.mmap, begin: int, path: Path) -> UserError:
    line = _line(data, min(_skip_blank(data, begin), len(data) - 1))
    return UserError(
        f"{path}: the row that begins at line {line} is never closed, so nobody can say how many rows are lost after it: mend "
        "the file (it may be cut off), or write it as one object a line (.jsonl), where a broken row costs only itself"
    )


def _object(data: mmap.mmap, start: int, path: Path) -> Iterator[Row | BadRow]:
    """A file that is one object: columns of values, a list of rows under one key, or a single row."""
    if len(data) > MAX_OBJECT_BYTES:
        raise UserError(
            f"{path} is one JSON object of {len(data) >> 20} MiB: write it as one object a line (.jsonl), which is "
            "read as a stream"
        )
    try:
        value = parse_object(decoded(data[start:], what="the file"))
    except ValueError as error:
        raise UserError(
            f"{path}: {error}. Mend it; if every line is meant to be one row, name the file .jsonl, and broken rows are set "
            "aside"
        ) from None
    for number, fields in enumerate(_rows_of_object(value, path), start=1):
        if isinstance(fields, dict):
            yield Row(number, fields)
        else:
            yield BadRow(number, f"the row is {spoken_type(fields)}, not an object with columns")


def _rows_of_object(value: dict[str, Any], path: Path) -> list[Any]:
    columns = list(value.values())
    if columns and all(isinstance(column, dict) for column in columns) and len({tuple(column) for column in columns}) == 1:
        columns = [list(column.values()) for column in columns]  # pandas: {"column": {"0": value, "1": value}}
    elif [isinstance(column, list) for column in columns].count(True) == 1:
        name = next(key for key, column in value.items() if isinstance(column, list))
        if name.lower() in ROW_LISTS and any(isinstance(row, dict) for row in value[name]):
            return list(value[name])
    if not columns or not all(isinstance(column, list) for column in columns):
        return [value]
    if any(isinstance(item, dict) for column in columns for item in column[:1]):
        return [value]  # a single row whose columns are lists of turns
    lengths = {name: len(column) for name, column in zip(value, columns)}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{path} is one object of columns, but they differ in length: {lengths}. Mend the file")
    return [dict(zip(value, items)) for items in zip(*columns)]
