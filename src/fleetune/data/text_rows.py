"""Plain text files. Blank lines part documents; a file without any has one document a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fleetune.data.json_rows import lines_of, too_large
from fleetune.data.rows import MAX_ROW_BYTES, BadRow, DataFile, Row, decoded


def read_text_file(file: DataFile) -> Iterator[Row | BadRow]:
    """Documents of a .txt file as rows with the one column `text`; a row's number is the line where it begins."""
    path = file.parts[0]
    if not _has_blank_line(path):
        for number, line in lines_of(path):
            if line is None or line.strip():
                yield _document(number, [(number, line)])
        return
    block: list[tuple[int, bytes | None]] = []
    size = 0
    for number, line in lines_of(path):
        if line is not None and not line.strip():
            if block:
                yield _document(block[0][0], block)
            block, size = [], 0
            continue
        size += len(line or b"")
        block.append((number, line if size <= MAX_ROW_BYTES else None))
    if block:
        yield _document(block[0][0], block)


def _has_blank_line(path: Path) -> bool:
    """Whether a blank line stands between two that are not."""
    has_text = has_blank_after = False
    for _, line in lines_of(path):
        is_blank = line is not None and not line.strip()
        if has_blank_after and not is_blank:
            return True
        has_text = has_text or not is_blank
        has_blank_after = has_text and is_blank
    return False


def _document(number: int, block: list[tuple[int, bytes | None]]) -> Row | BadRow:
    lines = []
    for line_number, line in block:
        if line is None:
            return BadRow(number, too_large(), number)
        try:
            lines.append(decoded(line, what=f"line {line_number}"))
        except ValueError as error:
            return BadRow(number, str(error), number)
    return Row(number, {"text": "\n".join(lines)}, number)
