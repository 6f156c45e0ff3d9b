"""From tokenised rows to a token store: rows cut to the sequence length, held out, repeated and packed. Pure index work.

Everything is done in blocks of 65,536 and written as a stream: no list of rows ever lies in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.data.keys import digest
from fleetune.data.packing import best_fit
from fleetune.data.permutation import Permutation, key_of
from fleetune.data.rows_store import MANIFEST, HashedFile, TokenizedRows, map_array
from fleetune.data.store import BOUND, DOCUMENT, ENTRY
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import write_json

BLOCK = 65_536


@dataclass(frozen=True)
class StoreOptions:
    """How rows become sequences.

    weights: per source, how often each row is seen in an epoch. held_out_share: share of the rows that is held out.
    held_out: whether this store is of the held-out rows (else of all others). in_order: reading order and one document a
    sequence, for evaluation.
    """

    sequence_length: int
    over_long: str
    packing: bool = True
    seed: int = 0
    weights: tuple[float, ...] = ()
    held_out_share: float = 0.0
    held_out: bool = False
    in_order: bool = False


@dataclass
class StoreCounts:
    """What happened to over-long rows; counted in rows' parts, except pieces."""

    over_long: int = 0
    dropped: int = 0
    cut: int = 0
    split: int = 0
    pieces: int = 0
    pieces_without_trained: int = 0
    answers_cut_off: int = 0
    not_drawn: int = 0
    examples: list[str] = field(default_factory=list)


def build_store(rows: TokenizedRows, folder: Path, options: StoreOptions) -> None:
    """Write the store of `rows` into `folder`. Raises UserError where nothing is left, or a row is over-long and may not be."""
    counts = StoreCounts()
    documents, entries, bounds = (HashedFile(folder / f"{name}.bin") for name in ("documents", "entries", "bounds"))
    unordered = HashedFile(folder / "unordered.bin")
    num_documents = num_entries = 0
    for block in _document_blocks(rows, options, counts):
        documents.write(block)
        drawn = _drawn(rows, block, num_documents, options, counts)
        unordered.write(drawn)
        num_documents += len(block)
        num_entries += len(drawn)
    hashes = [documents.close()]
    unordered.close()
    _check_any_left(num_entries, rows, options, counts)
    mapped = map_array(folder / "documents.bin", DOCUMENT)
    totals = _Totals()
    bounds.write(np.zeros(1, dtype=BOUND))
    for ordered, ends in _sequences(mapped, map_array(folder / "unordered.bin", ENTRY), rows, options):
        entries.write(ordered)
        bounds.write((ends + totals.entries).astype(BOUND))
        totals.add(mapped[ordered["document"]], len(ends))
    hashes += [entries.close(), bounds.close()]
    (folder / "unordered.bin").unlink()
    manifest = {
        "rows": f"../{rows.folder.name}",
        "rows_fingerprint": rows.fingerprint,
        "fingerprint": digest(rows.fingerprint, str(options.sequence_length), *hashes),
        "sequence_length": options.sequence_length,
        "num_documents": num_documents,
        "num_entries": num_entries,
        "num_sequences": totals.sequences,
        "num_tokens": totals.tokens,
        "num_trained_tokens": totals.trained,
        "report": vars(counts) | {"lengths": _histogram(rows)},
    }
    write_json(folder / MANIFEST, manifest)


@dataclass
class _Totals:
    entries: int = 0
    sequences: int = 0
    tokens: int = 0
    trained: int = 0

    def add(self, documents: np.ndarray, num_sequences: int) -> None:
        self.entries += len(documents)
        self.sequences += num_sequences
        self.tokens += int(documents["length"].sum(dtype=np.int64))
        self.trained += int(documents["trained"].sum(dtype=np.int64))


def _document_blocks(rows: TokenizedRows, options: StoreOptions, counts: StoreCounts) -> Iterator[np.ndarray]:
    """`DOCUMENT` blocks of this store's side of the rows, in reading order."""
    is_text = np.array([file["shape"] == "text" for file in rows.manifest["files"]])
    for start in range(0, len(rows.parts), BLOCK):
        parts = rows.parts[start : start + BLOCK]
        mine = np.flatnonzero(is_held_out(parts["ordinal"], rows, options) == options.held_out)
        fits = mine[parts["length"][mine] <= options.sequence_length]
        whole = np.zeros(len(fits), dtype=DOCUMENT)
        for name in ("offset", "length", "trained"):
            whole[name] = parts[name][fits]
        whole["row_part"] = fits + start
        whole["piece"] = -1
        blocks = [whole]
        for index in mine[parts["length"][mine] > options.sequence_length]:
            policy = "split" if is_text[parts[index]["file"]] and options.over_long != "error" else options.over_long
            blocks.append(_over_long(rows, int(index) + start, policy, options, counts))
        block = np.concatenate(blocks)
        yield block[np.argsort(block["row_part"], kind="stable")]


def is_held_out(ordinals: np.ndarray, rows: TokenizedRows, options: StoreOptions) -> np.ndarray:
    """Whether rows (by ordinal, int64 [N]) are held out: an exact share, chosen by (seed, content)."""
    if not options.held_out_share:
        return np.zeros(len(ordinals), dtype=bool)
    wanted = max(1, round(options.held_out_share * rows.num_rows))
    order = Permutation(rows.num_rows, key_of("held out", options.seed, rows.fingerprint))
    return order(ordinals) < wanted


def _over_long(rows: TokenizedRows, index: int, policy: str, options: StoreOptions, counts: StoreCounts) -> np.ndarray:
    """The documents of one part that is longer than a sequence."""
    part = rows.parts[index]
    length, limit = int(part["length"]), options.sequence_length
    counts.over_long += 1
    if policy in ("drop", "error"):
        counts.dropped += 1
        if len(counts.examples) < 20:
            counts.examples.append(f"{row_name(rows, part)} ({length} tokens)")
        return np.empty(0, dtype=DOCUMENT)
    # A piece begins with the last token of the one before it, so that no trained token is left without a prediction.
    starts = [0] if policy == "cut" else list(range(0, length - 1, limit - 1))
    found = np.zeros(len(starts), dtype=DOCUMENT)
    for number, start in enumerate(starts):
        stop = min(start + limit, length)
        where = slice(int(part["offset"]) + start + 1, int(part["offset"]) + stop)
        trained = int(rows.trained[where].sum(dtype=np.int64))
        found[number] = (int(part["offset"]) + start, stop - start, trained, index, -1 if policy == "cut" else number)
    kept = found[found["trained"] > 0]
    if policy == "cut":
        counts.cut += len(kept)
        counts.answers_cut_off += len(found) - len(kept)
    else:
        counts.split += 1
        counts.pieces += len(kept)
        counts.pieces_without_trained += len(found) - len(kept)
    return kept


def over_long_rows(rows: TokenizedRows, options: StoreOptions) -> Iterator[dict[str, Any]]:
    """Rows of which something is left out because of their length, in reading order: {source, file, row, line, cause}."""
    if options.over_long not in ("drop", "cut"):
        return
    done = "dropped" if options.over_long == "drop" else "cut at its end"
    for start in range(0, len(rows.parts), BLOCK):
        parts = rows.parts[start : start + BLOCK]
        for part in parts[parts["length"] > options.sequence_length]:
            file = rows.manifest["files"][int(part["file"])]
            if file["shape"] != "text":
                cause = f"has {int(part['length'])} tokens, more than sequence_length {options.sequence_length}: {done}"
                yield {"source": file["id"], "file": file["path"], "row": int(part["number"]), "line": None, "cause": cause}


def row_name(rows: TokenizedRows, part: np.void) -> str:
    return f"{rows.manifest['files'][int(part['file'])]['path']}, row {int(part['number'])}"


def _drawn(
    rows: TokenizedRows, documents: np.ndarray, first_document: int, options: StoreOptions, counts: StoreCounts
) -> np.ndarray:
    """`ENTRY`s of documents as often as their source's weight says: every row floor(weight) times, and a seeded choice of
    the rows, in the share that the fraction says, once more."""
    drawn = np.zeros(len(documents), dtype=ENTRY)
    drawn["document"] = np.arange(first_document, first_document + len(documents))
    if options.in_order or all(weight == 1 for weight in options.weights):
        return drawn
    parts = rows.parts[documents["row_part"]]
    copies = np.zeros(len(documents), dtype=np.int64)
    first_row = 0
    for source, weight in enumerate(options.weights):
        files = [index for index, file in enumerate(rows.manifest["files"]) if file["source"] == source]
        num_rows = sum(rows.manifest["files"][index]["rows"] for index in files)
        of_source = np.flatnonzero(np.isin(parts["file"], files))
        if num_rows and of_source.size:
            order = Permutation(num_rows, key_of("weight", options.seed, rows.fingerprint, source))
            once_more = order(parts["ordinal"][of_source] - first_row) < round((weight - math.floor(weight)) * num_rows)
            copies[of_source] = math.floor(weight) + once_more
        first_row += num_rows
    counts.not_drawn += int((copies == 0).sum())
    repeated = np.repeat(drawn, copies)
    starts = np.repeat(np.cumsum(copies) - copies, copies)
    repeated["repeat"] = np.arange(len(repeated)) - starts
    return repeated


def _sequences(
    documents: np.ndarray, unordered: np.ndarray, rows: TokenizedRows, options: StoreOptions
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(`ENTRY` [M], ends int64 [S]) of each block: entries in the order of their sequences, and where each one ends."""
    order = Permutation(len(unordered), key_of("order", options.seed, rows.fingerprint))
    for start in range(0, len(unordered), BLOCK):
        positions = np.arange(start, min(start + BLOCK, len(unordered)), dtype=np.int64)
        if options.in_order:
            yield unordered[positions], positions - start + 1
            continue
        block = unordered[order(positions)]
        if not options.packing:
            yield block, positions - start + 1
            continue
        bins = best_fit(documents["length"][block["document"]], options.sequence_length)
        flat = np.array([item for items in bins for item in items], dtype=np.int64)
        yield block[flat], np.cumsum([len(items) for items in bins])


def _check_any_left(num_entries: int, rows: TokenizedRows, options: StoreOptions, counts: StoreCounts) -> None:
    if options.over_long == "error" and counts.over_long:
        raise UserError(
            f"{counts.over_long} rows are longer than sequence_length {options.sequence_length}, and --over-long error forbids "
            f"that: {', '.join(counts.examples[:5])}. Give a larger --sequence-length, or --over-long drop, cut or split"
        )
    if num_entries:
        return
    longest = int(rows.parts["length"].max()) if len(rows.parts) else 0
    if counts.dropped or counts.answers_cut_off:
        raise UserError(
            f"no row is left to {'hold out' if options.held_out else 'train on'}: all {counts.over_long} are longer than "
            f"sequence_length {options.sequence_length} (the longest has {longest} tokens). Give a larger --sequence-length, "
            "or --over-long split"
        )
    if options.held_out_share:
        side = "held out" if options.held_out else "left to train on"
        raise UserError(
            f"validation_share {options.held_out_share} of {rows.num_rows} rows leaves none {side}: give more rows, another "
            "--validation-share, or a --validation file"
        )
    raise UserError(f"no row is left to train on of {rows.num_rows}: give larger --data-weights")


def _histogram(rows: TokenizedRows) -> list[list[int]]:
    """[upper bound in tokens, parts up to it] for powers of two, from the shortest to the longest."""
    counts: dict[int, int] = {}
    for start in range(0, len(rows.parts), BLOCK):
        lengths = rows.parts["length"][start : start + BLOCK].astype(np.int64)
        bits = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
        for power, count in zip(*np.unique(bits, return_counts=True)):
            counts[1 << int(power)] = counts.get(1 << int(power), 0) + int(count)
    return [[upper, count] for upper, count in sorted(counts.items())]


def describe(options: StoreOptions) -> dict[str, Any]:
    """The options as plain values, for the store's key."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(options).items()}
