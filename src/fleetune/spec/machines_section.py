"""The fields that name the machines of a run."""

from __future__ import annotations

from typing import Literal

from fleetune.spec.section import Numbers, Section, Words
from fleetune.spec.section import declare as _field


class MachinesSection(Section):
    """Which machines, and how they are reached."""

    nodes: int | None = _field(
        None,
        "Machines to train on: the first so many of --hosts or of the cluster file. Empty: all of them.",
        aliases=("num_nodes", "nnodes"),
        ge=1,
        le=1024,
        resume=True,
    )
    node_rank: int | None = _field(
        None,
        "Which machine this one is, where the command is given on each of them: number 0 leads the run and starts the "
        "processes of the others, on which it ends at once. Numbers follow --hosts or the cluster file; they balance no load.",
        ge=0,
        resume=True,
    )
    gpus_per_node: Numbers = _field(
        (), "Processes on each machine, in the order of the hosts, as 3,2,2. Empty: --gpus, shared out evenly.", resume=True
    )
    hosts: Words = _field(
        (),
        "The machines to train on, as a,b,c or user@a,b. The first must be this one: its run folder is the run's.",
        resume=True,
    )
    cluster: str | None = _field(
        None,
        "A cluster file with distributed_backend, node_list, master_addr and master_port. Empty: data/config.json, if there.",
        resume=True,
    )
    on: Literal["auto", "local", "ssh"] = _field(
        "auto",
        "How machines are reached. local: only this machine. auto: ssh, where hosts are given that are not this machine.",
        resume=True,
    )
    ssh_config: str | None = _field(
        None, "An ssh configuration file to use instead of your own: keys, ports, users, known hosts.", resume=True
    )
    backend: Literal["auto", "nccl", "gloo"] = _field(
        "auto",
        "What carries tensors between processes. auto: nccl between GPUs, gloo between CPU processes.",
        aliases=("distributed_backend",),
        resume=True,
    )
    allow_public_address: bool = _field(
        False, "Let machines talk over addresses of the public internet. What they say is not encrypted.", resume=True
    )
