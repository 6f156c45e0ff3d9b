"""Preparation of the data, once a node and before any process group: from what a person named to token stores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.data.cache import building, cache_folder, find
from fleetune.data.documents import StoreOptions, build_store, describe, over_long_rows
from fleetune.data.keys import FileHashes, code_version, data_key, digest
from fleetune.data.report import DataReport, bad_rows, make_report
from fleetune.data.request import DataRequest, PreparedData
from fleetune.data.rows import listed
from fleetune.data.rows_store import TokenizedRows
from fleetune.data.shapes import check_columns
from fleetune.data.sources import find_files
from fleetune.data.store import TokenStore
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.records import FORMAT_VERSION

if TYPE_CHECKING:
    from fleetune.data.tokenize_rows import RowTokenizer

__all__ = ["DataRequest", "PreparedData", "prepare_data"]


def prepare_data(
    request: DataRequest, tokenizer: Callable[[], Any], progress: Callable[[int], None] | None = None
) -> PreparedData:
    """Read, tokenise and pack the rows, or find that this was done before. Once a node.

    tokenizer: gives the model's (fast) tokenizer; called only where rows must be tokenised. The first call with the same
    content, tokenizer and options does the work, later ones only look it up. Bad rows are written to `request.quarantine`
    in any case, and before an error about them is raised. progress: told now and then how many rows are tokenised.

    Raises UserError: nothing to read, no known shape, too many bad rows, no row left to train on.
    """
    if not request.data:
        raise UserError("no data is given: add --data FILE")
    raise_if_any(check_columns(request.columns))
    folder = cache_folder(request.cache)

    def tokenized(names: Sequence[str]) -> TokenizedRows:
        return _tokenized(names, request, folder, lambda: _row_tokenizer(tokenizer(), request, progress))

    rows = tokenized(request.data)
    held_out = tokenized(request.validation) if request.validation else None
    options = _options(request)
    validation_options = _validation_options(request)
    if request.quarantine is not None:
        sides = [(rows, options)] + ([(held_out, validation_options)] if held_out and validation_options else [])
        _write_quarantine(request.quarantine, sides)
    raise_if_any(_problems(rows, request) + (_problems(held_out, request) if held_out else []))
    store = _packed(rows, options, folder)
    validation = _packed(held_out or rows, validation_options, folder) if validation_options else None
    return PreparedData(
        store=store.folder,
        validation_store=validation.folder if validation else None,
        num_sequences=store.num_sequences,
        fingerprint=store.fingerprint,
        report=make_report(store, options),
        validation_report=_validation_report(validation, validation_options, rows),
    )


def _validation_report(
    validation: TokenStore | None, options: StoreOptions | None, trained_on: TokenizedRows
) -> DataReport | None:
    if validation is None or options is None:
        return None
    report = make_report(validation, options)
    if options.held_out:
        return report
    shared = {file["path"] for file in trained_on.manifest["files"]} & {file.path for file in report.files}
    told = tuple(f"{path} is trained on too: its held-out loss says nothing about new rows" for path in sorted(shared))
    return replace(report, warnings=told + report.warnings)


def _options(request: DataRequest) -> StoreOptions:
    weights = request.data_weights or tuple(1.0 for _ in request.data)
    return StoreOptions(
        sequence_length=request.sequence_length,
        over_long=request.over_long,
        packing=request.packing,
        seed=request.seed,
        weights=weights,
        held_out_share=0.0 if request.validation else request.validation_share,
    )


def _validation_options(request: DataRequest) -> StoreOptions | None:
    """How the held-out rows are stored: in reading order, one document a sequence. None where there are none."""
    if not request.validation and not request.validation_share:
        return None
    return StoreOptions(
        sequence_length=request.sequence_length,
        over_long=request.over_long,
        seed=request.seed,
        held_out_share=0.0 if request.validation else request.validation_share,
        held_out=not request.validation,
        in_order=True,
    )


def _tokenized(
    names: Sequence[str], request: DataRequest, folder: Path, tokenizer: Callable[[], RowTokenizer]
) -> TokenizedRows:
    """The tokenised rows of `names`, made now or before."""
    found = find_files(names, offline=request.offline)
    hashes = FileHashes(folder / "hashes.json")
    key = data_key(found.files, request, hashes)
    name = f"rows-{key}"
    hashes.remember()
    if find(folder, name) is None:
        rows = tokenizer()
        with building(folder, name) as place:
            if place is not None:
                rows.write(found, place)
                if data_key(found.files, request, FileHashes(folder / "hashes.json")) != key:
                    raise UserError(f"{listed(names)} changed while it was read: start again when it is complete")
    return _opened(folder / name)


def _row_tokenizer(tokenizer: Any, request: DataRequest, progress: Callable[[int], None] | None) -> RowTokenizer:
    from fleetune.data.tokenize_rows import RowTokenizer  # templates and readers: not needed where the rows are there

    return RowTokenizer(tokenizer, request, progress)


def _opened(folder: Path) -> TokenizedRows:
    try:
        return TokenizedRows.open(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the prepared rows in {folder} cannot be read ({error}): delete that folder and start again"
        ) from error


def _packed(rows: TokenizedRows, options: StoreOptions, folder: Path) -> TokenStore:
    """The store of `rows` under `options`, made now or before."""
    name = f"store-{digest(rows.fingerprint, rows.folder.name, json.dumps(describe(options)), code_version())}"
    if find(folder, name) is None:
        with building(folder, name) as place:
            if place is not None:
                build_store(rows, place, options)
    return TokenStore.open(folder / name)


def _problems(rows: TokenizedRows, request: DataRequest) -> list[str]:
    """What is wrong with the rows as a whole: none at all, or too many bad ones."""
    files = rows.manifest["files"]
    paths = listed(str(file["path"]) for file in files)
    broken = sum(file["bad_rows"] for file in files)
    total = rows.num_rows + broken
    if total == 0:
        return [f"{paths}: there is no row in it. Give a file with rows"]
    if rows.num_rows and broken <= request.max_bad_share * total:
        return []
    causes = "; ".join(f"{count} × {cause}" for cause, count in list(rows.manifest["report"]["causes"].items())[:3])
    first = next(bad_rows(rows))
    where = f"the first at {first['file']}, line {first['line']}" if first["line"] else f"the first is row {first['row']}"
    listing = f" All are listed in {request.quarantine}." if request.quarantine else ""
    remedy = f"Mend them, or give --max-bad-share {_rounded_up(broken / total)}" if rows.num_rows else "Mend them"
    return [
        f"{paths}: {broken} of {total} rows cannot be used, more than max_bad_share {request.max_bad_share} allows ({where}). "
        f"Causes: {causes}.{listing} {remedy}"
    ]


def _rounded_up(share: float) -> float:
    return min(1.0, -(-int(share * 1000 + 1) // 10) / 100)


def _write_quarantine(path: Path, sides: Sequence[tuple[TokenizedRows, StoreOptions]]) -> None:
    """Write the bad and dropped rows down, whole: the same on every node and in every attempt. No file where there are none."""
    lines = (json.dumps({"version": FORMAT_VERSION, **entry}, ensure_ascii=False) + "\n" for entry in _set_aside(sides))
    first = next(lines, None)
    if first is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(first)
            file.writelines(lines)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}): give --run a place you may write to") from error
    finally:
        temporary.unlink(missing_ok=True)


def _set_aside(sides: Sequence[tuple[TokenizedRows, StoreOptions]]) -> Iterator[dict[str, Any]]:
    for rows, options in sides:
        for entry in bad_rows(rows):
            yield {"kind": "bad", **entry}
        for entry in over_long_rows(rows, options):
            yield {"kind": "over_long", **entry}
