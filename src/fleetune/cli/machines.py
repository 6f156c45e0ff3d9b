"""The machines of a run: found, reached and looked at before anything is written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fleetune.launch.checks import speed
from fleetune.launch.devices import Device, choose_processes
from fleetune.launch.fleet import Fleet
from fleetune.launch.shares import counts_given, share_out
from fleetune.launch.survey import Survey, survey_fleet
from fleetune.spec.cluster_file import choose_cluster
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.run_spec import RunSpec


@dataclass(frozen=True)
class Machines:
    """device: `cpu` or `cuda`. num_processes: in all. fleet: several machines, connected; None: this one alone."""

    device: Device = "cpu"
    num_processes: int = 1
    fleet: Fleet | None = None
    notes: tuple[str, ...] = ()

    def close(self) -> None:
        if self.fleet is not None:
            self.fleet.close()


def find_machines(spec: RunSpec, folder: Path, *, is_start: bool) -> Machines:
    """What a run would compute on. folder: where it would live. Raises UserError.

    is_start: the other machines are reached now. Else they are taken to be like this one, and that is said.
    """
    asked = spec.machines
    cluster = choose_cluster(asked, Path.cwd())
    if cluster is None:
        return _this_machine(spec, 1)
    if not is_start:
        assumed = _this_machine(spec, len(cluster.hosts))
        return Machines(assumed.device, assumed.num_processes, None, (f"{cluster.origin}: taken to be like this machine",))
    fleet = Fleet.connect(cluster, ssh_config=asked.ssh_config, on=asked.on, allow_public_address=asked.allow_public_address)
    if fleet is None:
        return _this_machine(spec, 1)
    try:
        device, num_processes = share_out(fleet, spec.layout, asked)
        survey = survey_fleet(fleet, folder)
        raise_if_any([finding.line() for finding in survey.errors])
    except BaseException:
        fleet.close()
        raise
    return Machines(device, num_processes, fleet, tuple(_notes(fleet, survey)))


def _this_machine(spec: RunSpec, num_nodes: int) -> Machines:
    """num_nodes: so many machines like this one."""
    layout, asked = spec.layout, spec.machines
    device, each = choose_processes(layout.device, None)
    if asked.backend == "nccl" and device == "cpu":
        raise UserError("backend nccl works between GPUs, and this run computes on the CPU: give --backend gloo")
    if asked.gpus_per_node:
        counts = counts_given(asked.gpus_per_node, layout.gpus, num_nodes)
        return Machines(device, sum(counts) if num_nodes > 1 else choose_processes(layout.device, counts[0])[1])
    if num_nodes == 1:
        return Machines(*choose_processes(layout.device, layout.gpus, layout.min_gpus))
    return Machines(device, layout.gpus or num_nodes * each)


def _notes(fleet: Fleet, survey: Survey) -> list[str]:
    """What a person should know of several machines before they start."""
    shares = ", ".join(f"{node.host}: {node.num_processes}" for node in fleet.nodes)
    notes = [f"machines ({fleet.cluster.origin}) and their processes: {shares}"]
    with suppress(ValueError):
        slowest = min(survey.pairs.items(), key=lambda pair: pair[1]["bytes_per_s"])
        latency = max(pair["rtt_s"] for pair in survey.pairs.values())
        way = f"{slowest[0]}, {speed(slowest[1]['bytes_per_s'])}"
        notes.append(f"slowest way: {way}; longest round trip {1000 * latency:.1f} ms")
    return notes + [finding.line() for finding in survey.findings if finding.level == "warning"]
