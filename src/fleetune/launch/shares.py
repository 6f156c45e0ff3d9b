"""How many processes each machine of a run gets, and what they compute on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetune.launch.devices import Device
from fleetune.launch.fleet import Fleet
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.layout_section import LayoutSection
from fleetune.spec.machines_section import MachinesSection


def share_out(fleet: Fleet, layout: LayoutSection, machines: MachinesSection) -> tuple[Device, int]:
    """Give every node its processes and ranks; returns (device, processes in all). Raises UserError."""
    device = common_device(fleet, layout.device)
    if fleet.cluster.backend == "nccl" and device == "cpu":
        raise UserError(
            f"backend nccl ({fleet.cluster.origin}) works between GPUs, and the machines train on their CPUs: write gloo, or "
            "use machines with GPUs"
        )
    counts = counts_of(fleet, layout, machines, device)
    first = 0
    problems = []
    for node, count in zip(fleet.nodes, counts):
        node.num_processes, node.first_rank = count, first
        first += count
        available = int(node.facts["visible_gpus"])
        if device == "cuda" and count > available:
            problems.append(
                f"{count} processes are asked for on {node.host}, which has {available} GPUs: give fewer with --gpus-per-node"
            )
    raise_if_any(problems)
    return device, first


def common_device(fleet: Fleet, asked: str) -> Device:
    """What all machines compute on. Raises UserError where some have GPUs and some have not."""
    if asked == "cpu":
        return "cpu"
    able = [node for node in fleet.nodes if _has_cuda(node.facts)]
    if len(able) == len(fleet.nodes):
        return "cuda"
    unable = next(node for node in fleet.nodes if not _has_cuda(node.facts))
    if asked == "cuda" or able:
        raise UserError(
            f"host {unable.host} has no GPU that its torch can use"
            + (f", and {able[0].host} has" if able else "")
            + ": leave it out of the hosts, or give --device cpu for all"
        )
    return "cpu"


def counts_of(fleet: Fleet, layout: LayoutSection, machines: MachinesSection, device: Device) -> Sequence[int]:
    """Processes of each node. Raises UserError for numbers that do not fit together."""
    num_nodes = len(fleet.nodes)
    if machines.gpus_per_node:
        return counts_given(machines.gpus_per_node, layout.gpus, num_nodes)
    if layout.gpus is None:
        return [int(node.facts["visible_gpus"]) if device == "cuda" else 1 for node in fleet.nodes]
    if layout.gpus % num_nodes:
        raise UserError(
            f"gpus {layout.gpus} are processes over all machines and do not divide evenly over {num_nodes}: give a multiple, "
            "or say how many each gets with --gpus-per-node"
        )
    return [layout.gpus // num_nodes] * num_nodes


def counts_given(given: Sequence[float], gpus: int | None, num_nodes: int) -> list[int]:
    """What --gpus-per-node says. Raises UserError."""
    counts = [int(count) for count in given]
    said = ",".join(f"{count:g}" for count in given)
    if any(count != asked or count < 1 for count, asked in zip(counts, given)):
        raise UserError(
            f"gpus_per_node {said} must be whole numbers, at least 1: leave a machine out instead of giving it none"
        )
    if len(counts) == 1:
        counts *= num_nodes
    if len(counts) != num_nodes:
        raise UserError(
            f"gpus_per_node {said} has {len(counts)} numbers, and there are {num_nodes} machines: give one for each"
        )
    if gpus is not None and gpus != sum(counts):
        raise UserError(f"gpus {gpus} and gpus_per_node {said} contradict each other ({sum(counts)} in all): give one")
    return counts


def _has_cuda(facts: dict[str, Any]) -> bool:
    return bool(facts["visible_gpus"]) and facts["cuda"] is not None
