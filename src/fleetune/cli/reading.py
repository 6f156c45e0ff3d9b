"""What `evaluate`, `generate`, `chat` and `data` share: which fields they take, and what they make of a run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fleetune.cli.flags import Typed
from fleetune.launch.devices import count_devices
from fleetune.spec.given import Source, environment_given
from fleetune.spec.read import read_run, resolve
from fleetune.spec.run_folder import RunFolder
from fleetune.spec.run_spec import RunSpec

#: How weights are read and computed with.
MODEL_FIELDS = ("revision", "offline", "allow_remote_code", "precision", "chat_template", "device", "threads", "log_level")
#: How rows are read.
ROW_FIELDS = ("data_shape", "columns", "sequence_length", "train_on")
#: What a run folder, given as the model, says of how it was trained and so is to be read.
_OF_RUN = ("sequence_length", "train_on", "chat_template", "precision")


def read_spec(typed: Typed, model: str, *, required: Sequence[str] = ("model",)) -> RunSpec:
    """The spec of typed flags and the environment for `model`. Raises UserError."""
    return read_fields(typed.fields, model, required=required)


def read_fields(
    fields: Mapping[str, Any],
    model: str,
    *,
    said: Literal["flag", "argument"] = "flag",
    required: Sequence[str] = ("model",),
) -> RunSpec:
    """The spec of some fields and the environment for `model`; a run folder's own settings count below them."""
    folder = RunFolder(Path(model).expanduser())
    earlier = None
    if model and folder.exists():
        whole = read_run(folder).source()
        kept = {name: whole.values[name] for name in _OF_RUN}
        earlier = Source("run", kept, origins=whole.origins)
    given = Source(said, {**fields, "model": model})
    return resolve(flags=given, environment=environment_given(os.environ), earlier=earlier, required=required).spec


def device_of(spec: RunSpec) -> str:
    """`cpu` or `cuda`. Raises UserError for a GPU that is not there."""
    return count_devices(spec.layout.device)[0]


def start_logging(spec: RunSpec) -> None:
    """Records and whatever libraries print go through the cleaning of secrets; only warnings where nobody asked for more."""
    from fleetune.monitor.logs import configure_logging

    level = spec.output.log_level
    configure_logging(level="warning" if level == "info" else level)
