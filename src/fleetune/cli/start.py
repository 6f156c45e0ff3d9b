"""Starting a run that was worked out: what is written into its folder, its supervisor, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetune.cli.foreign import keep
from fleetune.cli.intent import Intent, planned, with_plan
from fleetune.cli.place import opened
from fleetune.launch.fleet_run import supervise_fleet
from fleetune.launch.load import Load
from fleetune.launch.request import Launch, Patience
from fleetune.launch.supervisor import supervise
from fleetune.monitor.account import account_of
from fleetune.monitor.progress import ProgressView
from fleetune.spec.errors import EXIT_DONE, EXIT_USER
from fleetune.spec.layout import derive_layout
from fleetune.spec.read import write_run
from fleetune.spec.run_folder import RunFolder, append_line, read_json, write_json

#: Where nothing that was named comes from the hub, no library of a run's processes may ask it anything.
_NO_HUB = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class Finished:
    """A run that has ended, well or not. said: what its supervisor told the person."""

    folder: RunFolder
    exit_code: int
    said: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What the person must mend, as it was said."""
        return [line.removeprefix("error: ") for line in self.said if line.startswith("error: ")]

    def summary(self) -> dict[str, Any]:
        """The content of summary.json. Raises OSError where the run has none."""
        return read_json(self.folder.summary)


def start(intent: Intent, *, tell: Callable[[str], None]) -> Finished:
    """Make or open the run folder, start the run and watch it to its end. Raises UserError where nothing was started.

    tell: gets lines for the person. A new folder is removed again when the preparation finds something to mend.
    """
    folder, output = intent.folder, intent.spec.output
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        tell(line)

    with closing(intent), opened(folder) as place:
        write_json(folder.plan, intent.plan.to_json())
        kept = {"run": str(folder.path), **keep(intent.spec, folder.path)}
        write_run(folder, with_plan(intent.resolved, intent.plan).with_values(kept))
        load = Load()
        with ProgressView(folder, stream=sys.stderr, level=output.log_level, every=intent.spec.trackers.log_every) as view:
            if intent.fleet is None:
                code = supervise(folder, _launch(intent), on_poll=lambda: _poll(view, folder, load), say=say, lease=place.lease)
            else:
                code = supervise_fleet(folder, intent.fleet, _launch(intent), on_poll=view.poll, say=say, lease=place.lease)
        place.failed = code == EXIT_USER and not folder.prepared.exists()
        if code == EXIT_DONE:
            write_json(folder.summary, {**read_json(folder.summary), "account": account_of(folder).to_json()})
    return Finished(folder, code, said)


def _poll(view: ProgressView, folder: RunFolder, load: Load) -> None:
    """What the launching process does meanwhile: draw the progress, write down how busy this machine is."""
    view.poll()
    row = load.row()
    if row is not None:
        with suppress(OSError):  # a full disk is told where it matters
            append_line(folder.load, row)


def _launch(intent: Intent) -> Launch:
    rows, survival = intent.spec.rows, intent.spec.survival
    is_local = intent.located.revision is None and all(Path(name).exists() for name in (*rows.data, *rows.validation))
    return Launch(
        num_processes=intent.num_processes,
        min_processes=intent.spec.layout.min_gpus,
        device=intent.device,
        replan=lambda num_processes: _replan(intent, num_processes),
        threads=intent.spec.layout.threads,
        environment={"HF_HUB_DISABLE_TELEMETRY": "1", **(_NO_HUB if is_local else {})},
        prepare_arguments=("--device", intent.device),
        patience=Patience(restarts=survival.max_restarts, hang_s=survival.hang_timeout),
    )


def _replan(intent: Intent, num_processes: int) -> None:
    """The plan of the same run on another number of processes. Raises UserError where it cannot be done."""
    spec = with_plan(intent.resolved, intent.plan).spec
    layout = derive_layout(spec.layout.axes(), num_processes)
    write_json(intent.folder.plan, planned(spec, intent.located, layout, intent.device).to_json())
