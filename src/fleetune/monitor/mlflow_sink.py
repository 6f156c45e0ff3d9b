"""MLflow: a data base in the run folder, or the server that MLFLOW_TRACKING_URI names. Needs the extra `track`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetune.monitor.charts import STEP_CHARTS, VALIDATION_CHARTS, figures
from fleetune.monitor.logs import redact_values
from fleetune.monitor.sinks import Row
from fleetune.spec.errors import UserError

_MAX_VALUE = 500


class MlflowSink:
    """One run of MLflow, the same over restarts. identity: its id, None for a new one. offline: only the run folder."""

    def __init__(self, folder: Path, *, identity: str | None, name: str, config: Mapping[str, Any], offline: bool) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise UserError(
                "--mlflow needs the packages mlflow-skinny, sqlalchemy and alembic: install them with pip install "
                "'fleetune[track]', or leave --mlflow out (metrics.jsonl has the same figures)"
            ) from None
        folder.mkdir(exist_ok=True, mode=0o700)
        asked = None if offline else os.environ.get("MLFLOW_TRACKING_URI")
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=asked or f"sqlite:///{folder.absolute() / 'mlflow.db'}")
        if identity is not None:
            self.identity = identity
            self._client.update_run(identity, status="RUNNING")
            return
        found = self._client.get_experiment_by_name("fleetune")
        place = None if asked else (folder.absolute() / "artifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment("fleetune", artifact_location=place)
        self.identity = self._client.create_run(experiment, run_name=name).info.run_id
        values = redact_values(dict(config))
        self._client.log_batch(
            self.identity, params=[Param(key, str(value)[:_MAX_VALUE]) for key, value in values.items() if value is not None]
        )

    def step(self, row: Row) -> None:
        self._log(figures(STEP_CHARTS, row), row)

    def validation(self, row: Row) -> None:
        self._log(figures(VALIDATION_CHARTS, row), row)

    def event(self, row: Row) -> None:
        pass  # events.jsonl has them; MLflow has no place for single lines

    def flush(self) -> None:
        pass  # every call is written at once

    def close(self) -> None:
        self._client.set_terminated(self.identity)

    def _log(self, values: Mapping[str, float], row: Row) -> None:
        at = int(1000 * row["time"])
        self._client.log_batch(self.identity, [self._metric(key, value, at, row["step"]) for key, value in values.items()])
