"""The names under which trackers show a run's figures; the same in each of them."""

from __future__ import annotations

from fleetune.monitor.sinks import Row

#: Chart name -> key of a row.
STEP_CHARTS = {
    "train/loss": "loss",
    "train/gradient_norm": "gradient_norm",
    "train/learning_rate": "learning_rate",
    "train/trained_tokens": "trained_tokens",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/step_s": "step_s",
    "speed/data_wait_s": "data_wait_s",
    "speed/bytes_sent": "bytes_sent",
    "memory/peak_memory_bytes": "peak_memory_bytes",
}
VALIDATION_CHARTS = {"validation/loss": "validation_loss", "validation/perplexity": "validation_perplexity"}


def figures(charts: dict[str, str], row: Row) -> dict[str, float]:
    """Chart -> value, of those that the row has."""
    return {chart: float(row[key]) for chart, key in charts.items() if row.get(key) is not None}
