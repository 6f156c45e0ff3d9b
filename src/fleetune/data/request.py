"""What is asked of the data room, and what it gives back: plain values, cheap to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetune.data.report import DataReport
    from fleetune.spec.run_spec import RowsSection


@dataclass(frozen=True)
class DataRequest:
    """Which rows, and how they become sequences. The fields are those of the spec's `RowsSection`.

    tokenizer_fingerprint: content of the tokenizer and its chat template (`keys.tokenizer_fingerprint`), known without
    loading it. seed: of the packing order and of held-out rows. quarantine: where bad rows are written down (None: nowhere).
    cache: where stores live (None: `FLEETUNE_CACHE`, else the user's cache folder).
    """

    data: tuple[str, ...]
    tokenizer_fingerprint: str
    seed: int = 0
    data_weights: tuple[float, ...] = ()
    data_shape: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    validation: tuple[str, ...] = ()
    validation_share: float = 0.0
    sequence_length: int = 1024
    packing: bool = True
    over_long: str = "drop"
    train_on: str = "assistant"
    max_bad_share: float = 0.01
    offline: bool = False
    quarantine: Path | None = None
    cache: Path | None = None

    @staticmethod
    def of_rows(
        rows: RowsSection,
        *,
        tokenizer_fingerprint: str,
        seed: int,
        offline: bool = False,
        quarantine: Path | None = None,
        cache: Path | None = None,
    ) -> DataRequest:
        """The request that the spec's rows make."""
        return DataRequest(
            data=tuple(rows.data),
            tokenizer_fingerprint=tokenizer_fingerprint,
            seed=seed,
            data_weights=tuple(rows.data_weights),
            data_shape=rows.data_shape,
            columns=dict(rows.columns),
            validation=tuple(rows.validation),
            validation_share=rows.validation_share,
            sequence_length=rows.sequence_length,
            packing=rows.packing,
            over_long=rows.over_long,
            train_on=rows.train_on,
            max_bad_share=rows.max_bad_share,
            offline=offline,
            quarantine=quarantine,
            cache=cache,
        )


@dataclass(frozen=True)
class PreparedData:
    """Stores that `TokenStore.open` maps, and what was found on the way.

    store: the training rows. validation_store: the held-out rows, in reading order, one document a sequence; None where
    there are none. fingerprint: hash of the training store's content, not of the options that made it.
    """

    store: Path
    validation_store: Path | None
    num_sequences: int
    fingerprint: str
    report: DataReport
    validation_report: DataReport | None = None
