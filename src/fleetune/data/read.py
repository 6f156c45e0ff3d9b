"""Rows of any data file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fleetune.data.json_rows import read_json_file
from fleetune.data.rows import BadRow, DataFile, Row
from fleetune.data.table_rows import read_arrow_folder, read_csv_file, read_parquet_file
from fleetune.data.text_rows import read_text_file
from fleetune.spec.errors import UserError

_READERS: dict[str, Callable[[DataFile], Iterator[Row | BadRow]]] = {
    "json": read_json_file,
    "csv": read_csv_file,
    "text": read_text_file,
    "parquet": read_parquet_file,
    "arrow": read_arrow_folder,
}
#: First bytes of what is no text, and what to do about it.
_FOREIGN = {
    b"\x1f\x8b": "is packed with gzip: unpack it first",
    b"PK\x03\x04": "is a zip archive (or an Excel file): unpack or export it first",
    b"\x28\xb5\x2f\xfd": "is packed with zstd: unpack it first",
    b"BZh": "is packed with bzip2: unpack it first",
    b"\xff\xfe": "is UTF-16: convert it to UTF-8 first",
    b"\xfe\xff": "is UTF-16: convert it to UTF-8 first",
    b"PAR1": "is a Parquet file: name it .parquet",
    b"ARROW1": "is an Arrow file: name it .arrow",
}


def read_rows(file: DataFile) -> Iterator[Row | BadRow]:
    """Every row of `file`, usable or not, in order. Raises UserError where the file as a whole cannot be read."""
    try:
        if file.format in ("json", "csv", "text"):
            _refuse_foreign(file)
        yield from _READERS[file.format](file)
    except OSError as error:
        raise UserError(f"{file.path} cannot be read: {error.strerror or error}") from error


def _refuse_foreign(file: DataFile) -> None:
    with open(file.parts[0], "rb") as handle:
        head = handle.read(8)
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise UserError(f"{file.path} {what}")
