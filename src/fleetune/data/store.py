"""The token store: documents (tokenised rows, or their pieces) and the sequences they are packed into, memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.data.rows_store import MANIFEST, TokenizedRows, check_sizes, map_array
from fleetune.spec.errors import UserError
from fleetune.spec.records import MicroBatch
from fleetune.spec.run_folder import read_json

#: What the model reads as one text. row_part: index into the tokenised rows' parts; piece: -1, or its number in the part.
DOCUMENT = np.dtype([("offset", "<i8"), ("length", "<i4"), ("trained", "<i4"), ("row_part", "<i8"), ("piece", "<i4")])
#: A document's place in a sequence. repeat: 0, or which further copy of the epoch (a source with a weight above 1).
ENTRY = np.dtype([("document", "<i8"), ("repeat", "<i4")])
BOUND = np.dtype("<i8")


@dataclass(frozen=True)
class TokenStore:
    """Documents and sequences, ready to be read from any thread.

    documents: `DOCUMENT` [D] in reading order. entries: `ENTRY` [M], sequence s holds entries[bounds[s]:bounds[s + 1]].
    """

    folder: Path
    rows: TokenizedRows
    documents: np.ndarray
    entries: np.ndarray
    bounds: np.ndarray
    manifest: dict[str, Any]

    @staticmethod
    def open(folder: Path | str) -> TokenStore:
        """Map a store made by `prepare_data`. Raises UserError where it is gone or not whole."""
        folder = Path(folder)
        try:
            manifest = read_json(folder / MANIFEST)
            sizes = {
                "documents.bin": manifest["num_documents"] * DOCUMENT.itemsize,
                "entries.bin": manifest["num_entries"] * ENTRY.itemsize,
                "bounds.bin": (manifest["num_sequences"] + 1) * BOUND.itemsize,
            }
            check_sizes(folder, sizes)
            rows = TokenizedRows.open((folder / manifest["rows"]).resolve())
            if rows.fingerprint != manifest["rows_fingerprint"]:
                raise ValueError(f"{rows.folder} is not what {folder} was packed from: delete both and start again")
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"the prepared data in {folder} cannot be read ({error}): run the same command again, which prepares it anew"
            ) from error
        return TokenStore(
            folder,
            rows,
            map_array(folder / "documents.bin", DOCUMENT),
            map_array(folder / "entries.bin", ENTRY),
            map_array(folder / "bounds.bin", BOUND),
            manifest,
        )

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def num_sequences(self) -> int:
        return len(self.bounds) - 1

    @property
    def fingerprint(self) -> str:
        """Hash of everything a run reads from here: tokens, what is trained, documents and sequences."""
        return str(self.manifest["fingerprint"])

    @property
    def sequence_length(self) -> int:
        return int(self.manifest["sequence_length"])

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return int(self.manifest["num_tokens"])

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of one epoch."""
        return int(self.manifest["num_trained_tokens"])

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int64 [L], trained bool [L]) of one document."""
        document = self.documents[number]
        where = slice(int(document["offset"]), int(document["offset"]) + int(document["length"]))
        trained = self.rows.trained[where].astype(bool)
        trained[0] = False  # the first token of a piece has nothing before it
        return self.rows.tokens[where].astype(np.int64), trained

    def sample_id(self, number: int, repeat: int = 0) -> str:
        """`source:row[:repeat][#piece]` of one document."""
        document = self.documents[number]
        part = self.rows.parts[document["row_part"]]
        name = self.rows.manifest["files"][int(part["file"])]["id"]
        pieces = ".".join(str(int(piece)) for piece in (part["part"], document["piece"]) if piece >= 0)
        again = f":{repeat}" if repeat else ""
        return f"{name}:{int(part['number'])}{again}" + (f"#{pieces}" if pieces else "")

    def num_documents_of(self, max_rows: int | None) -> int:
        """How many documents the first `max_rows` rows make; all of them for None."""
        if max_rows is None or not self.num_documents:
            return self.num_documents
        ordinals = self.rows.parts["ordinal"][self.documents["row_part"]]
        row_number = np.concatenate([[0], np.cumsum(np.diff(ordinals) != 0)])
        return int(np.searchsorted(row_number, max_rows, side="left"))

    def longest_first(self) -> np.ndarray:
        """The sequences by their number of tokens, int64 [S], the longest first; equal ones in their order."""
        return np.argsort(-self._lengths(np.add), kind="stable")

    def entries_of(self, sequence: int) -> np.ndarray:
        """`ENTRY` [D] of one sequence."""
        return self.entries[int(self.bounds[sequence]) : int(self.bounds[sequence + 1])]

    def heaviest_first(self) -> np.ndarray:
        """Sequence numbers, int64 [num_sequences]: those with the longest document first, since attention and padding grow with
        it, and of these the ones with the most tokens."""
        return np.lexsort((-self._lengths(np.add), -self._lengths(np.maximum)))  # equal ones stay in their order

    def _lengths(self, of: np.ufunc) -> np.ndarray:
        """int64 [num_sequences]: the lengths of each sequence's documents, put together by `of`. None is without a document."""
        lengths = self.documents["length"][self.entries["document"]].astype(np.int64)
        return of.reduceat(lengths, np.asarray(self.bounds[:-1], dtype=np.int64))

    def sample_ids(self, sequences: Sequence[int] | np.ndarray) -> tuple[str, ...]:
        """Sample ids of `sequences`, in order."""
        return tuple(
            self.sample_id(int(entry["document"]), int(entry["repeat"]))
            for sequence in sequences
            for entry in self.entries_of(int(sequence))
        )

    def micro_batch(self, *, step: int, number: int, sequences: Sequence[int] | np.ndarray) -> MicroBatch:
        """A micro-batch of whole sequences."""
        entries = [self.entries_of(int(sequence)) for sequence in sequences]
        flat = np.concatenate(entries) if entries else np.empty(0, dtype=ENTRY)
        return self.gather(
            step=step,
            number=number,
            sequences=tuple(int(sequence) for sequence in sequences),
            entries=flat,
            sequence_bounds=bounds_of([len(part) for part in entries]),
        )

    def gather(
        self, *, step: int, number: int, sequences: tuple[int, ...], entries: np.ndarray, sequence_bounds: np.ndarray
    ) -> MicroBatch:
        """A micro-batch of the documents of `entries`."""
        read = [self.document(int(entry["document"])) for entry in entries]
        return MicroBatch(
            step=step,
            number=number,
            sequences=sequences,
            tokens=np.concatenate([tokens for tokens, _ in read]) if read else np.empty(0, dtype=np.int64),
            trained=np.concatenate([trained for _, trained in read]) if read else np.empty(0, dtype=bool),
            document_bounds=bounds_of([len(tokens) for tokens, _ in read]),
            sequence_bounds=sequence_bounds,
            samples=tuple(self.sample_id(int(entry["document"]), int(entry["repeat"])) for entry in entries),
        )


def bounds_of(lengths: Sequence[int]) -> np.ndarray:
    """int64 [N + 1]: where each of N parts begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)
