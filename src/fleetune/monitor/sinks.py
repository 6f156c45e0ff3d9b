"""Where records of a run go besides the run folder. One contract; each place is one file of its own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fleetune.spec.run_folder import RunFolder, read_json, write_json

Row = Mapping[str, Any]

#: Ids under which trackers know a run, so that a resumed one is the same there.
_IDENTITIES = "trackers.json"


class Sink(Protocol):
    """A place that shows a run. Rank 0 calls it, from one thread, rows in the order they happen.

    Rows have the keys of `metrics.jsonl` and `events.jsonl`; a number that was not finite is None. A sink may raise: it is
    then told and left out, and training goes on.
    """

    def step(self, row: Row) -> None: ...

    def validation(self, row: Row) -> None: ...

    def event(self, row: Row) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def make_sinks(
    folder: RunFolder,
    asked: Sequence[str],
    *,
    first_step: int,
    config: Mapping[str, Any] | None = None,
    offline: bool = False,
) -> list[Sink]:
    """The sinks that were asked for: `tensorboard`, `wandb`, `mlflow`.

    first_step: the step this attempt starts with (1 in a new run); what an earlier attempt showed from there on is replaced,
    where a tracker can. config: the run's settings. offline: no sink may use the network. Raises UserError where an optional
    package is missing.
    """
    sinks: list[Sink] = []
    identities = _identities(folder)
    common: dict[str, Any] = {"name": folder.path.name, "config": config or {}, "offline": offline}
    if "tensorboard" in asked:
        from fleetune.monitor.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(folder.tensorboard, first_step=first_step))
    if "wandb" in asked:
        from fleetune.monitor.wandb_sink import WandbSink

        identity = identities.setdefault("wandb", secrets.token_hex(4))
        _remember(folder, identities)
        sinks.append(WandbSink(folder.path, identity=identity, **common))
    if "mlflow" in asked:
        from fleetune.monitor.mlflow_sink import MlflowSink

        sink = MlflowSink(folder.path / "mlflow", identity=identities.get("mlflow"), **common)
        identities["mlflow"] = sink.identity
        _remember(folder, identities)
        sinks.append(sink)
    return sinks


def _identities(folder: RunFolder) -> dict[str, str]:
    try:
        found = read_json(folder.path / _IDENTITIES)
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in found.items() if name != "version"}


def _remember(folder: RunFolder, identities: Mapping[str, str]) -> None:
    write_json(folder.path / _IDENTITIES, identities)
