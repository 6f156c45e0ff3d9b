"""The machines of a run: found, reached and looked at before anything is written."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fleetune.launch.addresses import is_own
from fleetune.launch.checks import speed
from fleetune.launch.devices import Device, choose_processes
from fleetune.launch.fleet import Fleet, resolve_quietly
from fleetune.launch.shares import counts_given, share_out
from fleetune.launch.survey import Survey, survey_fleet
from fleetune.spec.cluster_file import choose_cluster
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.run_spec import RunSpec


class LedElsewhere(UserError):
    """This machine is not the first of the run: whoever asked has nothing to mend, and nothing to do here."""


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


def led_elsewhere(spec: RunSpec) -> str | None:
    """Why there is nothing to do on this machine: by its node_rank another one leads the run. None where this one does.

    Raises UserError for a number that no machine has, or that is another machine's.
    """
    rank = spec.machines.node_rank
    cluster = choose_cluster(spec.machines, Path.cwd()) if rank is not None else None
    if rank is None or (cluster is None and rank == 0):
        return None
    if cluster is None:
        raise UserError(f"node_rank {rank} is out of range, since no machines are named: give --hosts a,b, or leave it out")
    if rank >= len(cluster.hosts):
        numbers = f"0 to {len(cluster.hosts) - 1}" if len(cluster.hosts) > 1 else "0 alone"
        raise UserError(
            f"node_rank {rank} is out of range: machines ({cluster.origin}) are numbered {numbers}: give one of these"
        )
    host = cluster.hosts[rank]
    address = resolve_quietly(host.rpartition("@")[2])
    if address is not None and not is_own(address):
        raise UserError(
            f"node_rank {rank} is {host} ({cluster.origin}), and this machine ({socket.gethostname()}) has not its address: "
            "give the number of this machine"
        )
    if rank == 0:
        return None
    return f"machine {rank} ({host}) is led by machine 0 ({cluster.hosts[0]}), which starts its processes: nothing to do here"


def find_machines(spec: RunSpec, folder: Path, *, is_start: bool) -> Machines:
    """What a run would compute on. folder: where it would live. Raises UserError.

    is_start: the other machines are reached now. Else they are taken to be like this one, and that is said.
    """
    asked = spec.machines
    cluster = choose_cluster(asked, Path.cwd())
    elsewhere = led_elsewhere(spec)
    if elsewhere is not None:
        raise LedElsewhere(elsewhere)
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
