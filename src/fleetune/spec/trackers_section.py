"""The fields that name trackers: programs of others that show a run."""

from __future__ import annotations

from fleetune.spec.section import Section
from fleetune.spec.section import declare as _field


class TrackersSection(Section):
    """What shows the run beside its own folder."""

    log_every: int = _field(
        1,
        "Where there is no terminal, print a line every so many steps. metrics.jsonl has every step.",
        aliases=("logging_steps",),
        ge=1,
        resume=True,
    )
    tensorboard: bool = _field(False, "Also write TensorBoard event files into the run folder.", resume=True)
    wandb: bool = _field(False, "Also keep a W&B run: in your account if you are logged in, else in files.", resume=True)
    mlflow: bool = _field(False, "Also keep an MLflow run: in the run folder, or at MLFLOW_TRACKING_URI.", resume=True)
