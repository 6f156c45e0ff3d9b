"""Weights & Biases: files in the run folder, or the person's account where they are logged in. Needs the extra `track`.

Only what a chart shows and the run's own settings are given to it: no console output, no code, no environment, no command
line, no machine facts.
"""

from __future__ import annotations

import netrc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from fleetune.monitor.charts import STEP_CHARTS, VALIDATION_CHARTS, figures
from fleetune.monitor.logs import redact_values
from fleetune.monitor.sinks import Row
from fleetune.spec.errors import UserError

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbSink:
    """One run of W&B, the same over restarts. identity: its id. offline: never use the network."""

    def __init__(self, folder: Path, *, identity: str, name: str, config: Mapping[str, Any], offline: bool) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "--wandb needs the package wandb: install it with pip install 'fleetune[track]', or leave --wandb out "
                "(metrics.jsonl has the same figures)"
            ) from None
        folder.mkdir(exist_ok=True, mode=0o700)
        while list(folder.glob(f"wandb/*run-{time.strftime('%Y%m%d_%H%M%S')}-{identity}")):
            time.sleep(0.1)  # it names a session's files by the second, and would write over those of one just ended
        self._run = wandb.init(
            dir=str(folder),
            id=identity,
            name=name,
            project=os.environ.get("WANDB_PROJECT", "fleetune"),
            resume="allow",
            mode=_mode(offline),
            config=redact_values(dict(config)),
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
            ),
        )
        # W&B's own counter only grows; a resumed run may make a step again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, row: Row) -> None:
        self._run.log({"step": row["step"], **figures(STEP_CHARTS, row)})

    def validation(self, row: Row) -> None:
        self._run.log({"step": row["step"], **figures(VALIDATION_CHARTS, row)})

    def event(self, row: Row) -> None:
        pass  # events.jsonl has them; W&B has no place for single lines

    def flush(self) -> None:
        pass  # it writes by itself

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # waits until the process that writes for W&B has done so; this one may end without a goodbye


def _mode(offline: bool) -> Mode:
    """`online` only for somebody who is logged in and has not forbidden it."""
    if offline:
        return "offline"
    asked = os.environ.get("WANDB_MODE")
    if asked:
        return cast(Mode, asked)
    return "online" if _has_key() else "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
