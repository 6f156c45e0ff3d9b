"""TensorBoard event files in the run folder; one line a run, also over restarts. Needs the extra `track`."""

from __future__ import annotations

from pathlib import Path

from fleetune.monitor.charts import STEP_CHARTS, VALIDATION_CHARTS, figures
from fleetune.monitor.sinks import Row
from fleetune.spec.errors import UserError

#: Written out at least this often, so that a watcher sees the run live.
FLUSH_S = 10


class TensorBoardSink:
    """Charts of a run. first_step: points of earlier attempts from this step on disappear from the charts."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "--tensorboard needs the package tensorboard: install it with pip install 'fleetune[track]', or leave "
                "--tensorboard out (metrics.jsonl has the same figures)"
            ) from None
        folder.mkdir(exist_ok=True, mode=0o700)
        purge_step = first_step if first_step > 1 else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_S)

    def step(self, row: Row) -> None:
        self._add(STEP_CHARTS, row)

    def validation(self, row: Row) -> None:
        self._add(VALIDATION_CHARTS, row)

    def event(self, row: Row) -> None:
        details = ", ".join(f"{key}: {value}" for key, value in row.items() if key not in ("event", "time", "version"))
        self._writer.add_text(f"events/{row['event']}", details, row.get("step"), walltime=row["time"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, charts: dict[str, str], row: Row) -> None:
        for chart, value in figures(charts, row).items():
            self._writer.add_scalar(chart, value, row["step"], walltime=row["time"])
