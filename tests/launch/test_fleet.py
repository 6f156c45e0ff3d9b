"""Several machines, as far as one machine has several addresses: each node's own process, with its own agent."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleetune.launch.fleet import Fleet
from fleetune.launch.fleet_run import supervise_fleet
from fleetune.launch.request import Patience
from fleetune.launch.shares import share_out
from fleetune.launch.survey import survey_fleet
from fleetune.spec.cluster_file import Cluster
from fleetune.spec.errors import UserError
from fleetune.spec.machines_section import MachinesSection
from fleetune.spec.run_folder import read_lines
from fleetune.spec.run_spec import LayoutSection
from launch.runs import PATIENCE, TinyRun, tiny_launch

HOSTS = ("127.0.0.1", "127.0.0.2")


def connect(**cluster: Any) -> Fleet:
    fleet = Fleet.connect(Cluster(HOSTS, "hosts", **cluster), ssh_config=None, on="auto")
    assert fleet is not None
    return fleet


def train(
    run: TinyRun, machines: MachinesSection | None = None, on_poll: Callable[[Fleet], None] = lambda fleet: None, **changes: Any
) -> int:
    """Supervise a run on two nodes of this machine; its folder is shared."""
    fleet = connect()
    try:
        _, num_processes = share_out(fleet, LayoutSection(device="cpu"), machines or MachinesSection())
        (run.folder.path / "run.yaml").write_text("{}")
        launch = tiny_launch(num_processes, **changes)
        return supervise_fleet(run.folder, fleet, launch, on_poll=lambda: on_poll(fleet), say=run.said.append)
    finally:
        fleet.close()


def make(tmp_path: Path, plan: dict[str, Any], **others: dict[str, Any]) -> TinyRun:
    everybody = {f"*/{rank}": plan for rank in range(3)}
    return TinyRun.make(tmp_path / "a run; $(x)", {**everybody, **{k.replace("_", "/"): v for k, v in others.items()}})


@pytest.mark.claim(
    "H34",
    command="fleetune train --hosts a,b --gpus-per-node 2,1",
    seen="unequal numbers of processes on the machines",
)
@pytest.mark.claim(
    "X44",
    command="fleetune train --hosts a,b",
    seen="load.jsonl of the run folder has processor, memory, network and GPU figures of every node",
)
@pytest.mark.claim(
    "X38",
    command="fleetune train --hosts a,b",
    seen="load.jsonl of the run folder has processor, memory, network and GPU figures of every node",
)
@pytest.mark.claim(
    "H31",
    command="fleetune train --hosts a,b",
    seen="load.jsonl of the run folder has processor, memory, network and GPU figures of every node",
)
def test_unequal_nodes_train_together(tmp_path: Path) -> None:
    run = make(tmp_path, {"steps": 5, "sync": True})
    listening: set[str] = set()

    def look(fleet: Fleet) -> None:
        for pid in [*run.store_pids(), *run.pids().values()]:
            try:
                connections = psutil.Process(pid).net_connections("inet")
            except psutil.Error:
                continue
            listening.update(c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN)

    assert train(run, MachinesSection(gpus_per_node=(2, 1)), look) == 0, run.said
    assert listening == {"127.0.0.1"}
    places = [json.loads((run.folder.path / f"environment-0-{rank}").read_text()) for rank in range(3)]
    assert [place["GROUP_RANK"] for place in places] == ["0", "0", "1"]
    assert {place["WORLD_SIZE"] for place in places} == {"3"} and {place["GROUP_WORLD_SIZE"] for place in places} == {"2"}
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1", "0"]
    assert "rank 2 of attempt 0 speaks" in run.log(2)
    load = list(read_lines(run.folder.load))
    assert {row["node"] for row in load} == {0, 1} and all(row["memory_used_bytes"] > 0 for row in load)
    assert not run.living() and not run.store_pids()


def test_a_rank_that_breaks_on_one_node_is_named_and_all_start_again(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "first": 4, "steps": 2}, **{
        "0_0": {"sync": True, "steps": 400, "step_s": 0.02},
        "0_1": {"sync": True, "steps": 4, "step_s": 0.02, "then": "kill"},
    })  # fmt: skip
    assert train(run) == 0, run.said
    assert run.attempts() == 2
    failure = run.events("failure")[0]
    assert (failure["rank"], failure["node"]) == (1, 1) and "signal 9 (SIGKILL)" in failure["cause"], failure
    assert not run.living()


@pytest.mark.claim(
    "H5",
    command="fleetune train --hosts a,b",
    seen="a lost machine is named, reached again, and the run goes on from its checkpoint",
)
def test_a_lost_node_ends_the_attempt_and_is_had_back(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "first": 2, "steps": 2}, **{
        "0_0": {"sync": True, "steps": 4000, "step_s": 0.02},
        "0_1": {"sync": True, "steps": 4000, "step_s": 0.02},
    })  # fmt: skip
    killed: list[int] = []

    def kill_node(fleet: Fleet) -> None:
        if not killed and run.folder.ledger.exists():
            agent = psutil.Process(run.pids()["0-1"]).parent()
            node = next(one for one in [agent, *agent.parents()] if "fleetune.launch.node" in one.cmdline())
            killed.append(node.pid)
            os.kill(node.pid, signal.SIGKILL)

    assert train(run, on_poll=kill_node) == 0, run.said
    assert killed and run.attempts() == 2
    failure = run.events("failure")[0]
    assert failure["node"] == 1 and "node 1 (127.0.0.2) is lost" in failure["cause"] and "SIGKILL" in failure["cause"]
    assert not run.living()


def test_a_wish_of_a_rank_on_another_node_decides_for_all(tmp_path: Path) -> None:
    run = make(tmp_path, {"sync": True, "steps": 400, "step_s": 0.02}, **{
        "*_1": {"sync": True, "steps": 2, "step_s": 0.02, "then": "user"},
    })  # fmt: skip
    assert train(run) == 2
    assert run.attempts() == 1 and "error: give another --data" in run.said
    assert not run.living()


def test_a_failing_preparation_is_told_with_its_host_and_nothing_is_trained(tmp_path: Path) -> None:
    run = make(tmp_path, {"steps": 1})
    assert train(run, prepare_arguments=("--then", "user", "--only", "1"), patience=PATIENCE) == 2
    assert "error: 127.0.0.2: rows.jsonl has no rows: give another --data" in run.said
    assert run.attempts() == 0 and not run.living()


def test_what_is_wrong_on_the_first_machine_is_told_once_and_the_others_are_not_asked(tmp_path: Path) -> None:
    run = make(tmp_path, {"steps": 1})
    assert train(run, prepare_arguments=("--then", "user"), patience=PATIENCE) == 2
    assert [line for line in run.said if "has no rows" in line] == ["error: rows.jsonl has no rows: give another --data"]
    assert not (run.folder.path / "told-1").exists() and not run.living()


def test_the_first_machine_decides_for_all_what_they_compute_in(tmp_path: Path) -> None:
    run = make(tmp_path, {"steps": 1, "sync": True})
    assert train(run) == 0, run.said
    assert (run.folder.path / "told-0").read_text() == "None", "the first machine was told instead of asked"
    assert (run.folder.path / "told-1").read_text() == "bf16"


def test_a_run_that_never_gets_on_is_given_up(tmp_path: Path) -> None:
    run = make(tmp_path, {"then": "crash"})
    assert train(run, patience=Patience(restarts=1, backoff_s=0.1, peers_s=1.0, cleanup_s=1.0)) == 2
    assert run.attempts() == 2 and any("gave up after 1 restarts" in line for line in run.said)


def test_the_survey_measures_every_way_and_says_when_the_port_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        fleet = connect(port=taken.getsockname()[1])
        try:
            survey = survey_fleet(fleet, tmp_path)
        finally:
            fleet.close()
    assert survey.pairs.keys() == {"127.0.0.1 to 127.0.0.2", "127.0.0.2 to 127.0.0.1"}
    assert all(pair["bytes_per_s"] > 1e6 and 0 < pair["rtt_s"] < 1 for pair in survey.pairs.values())
    (error,) = survey.errors
    assert f"port {fleet.cluster.port}" in error.text and "Address already in use" in error.text
    assert all(node.facts["disks"][0]["writable"] for node in fleet.nodes)


@pytest.mark.parametrize(
    ("hosts", "on", "told"),
    [
        (("127.0.0.1", "localhost"), "auto", "are one machine"),
        (("no-such-host.invalid", "127.0.0.1"), "auto", "has no address"),
        (("192.0.2.77", "127.0.0.1"), "local", "on local trains on this machine alone"),
        (("192.0.2.77", "127.0.0.1"), "auto", "is not this one"),
        (("127.0.0.1", "8.8.8.8"), "auto", "of the public internet"),
    ],
)
def test_hosts_that_cannot_be_are_refused_before_anything_is_reached(hosts: tuple[str, ...], on: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        Fleet.connect(Cluster(hosts, "hosts"), ssh_config=None, on=on)


def test_one_host_that_is_this_machine_needs_no_fleet() -> None:
    assert Fleet.connect(Cluster(("localhost",), "hosts"), ssh_config=None, on="auto") is None


@pytest.mark.parametrize(
    ("layout", "machines", "told"),
    [
        ({"gpus": 3}, {}, "do not divide evenly over 2"),
        ({}, {"gpus_per_node": (1, 1, 1)}, "has 3 numbers, and there are 2 machines"),
        ({"gpus": 2}, {"gpus_per_node": (1, 2)}, "contradict each other"),
        ({}, {"gpus_per_node": (1, 1.5)}, "must be whole numbers"),
        ({"device": "cuda"}, {}, "has no GPU"),
    ],
)
def test_shares_that_do_not_fit_are_refused(layout: dict[str, Any], machines: dict[str, Any], told: str) -> None:
    if "device" in layout and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has its own GPUs")
    fleet = connect()
    try:
        with pytest.raises(UserError, match=told):
            share_out(fleet, LayoutSection(**{"device": "cpu", **layout}), MachinesSection(**machines))
    finally:
        fleet.close()


@pytest.mark.claim(
    "H11",
    command='data/config.json with "distributed_backend": "nccl"',
    seen="refused on machines without a GPU, with gloo as the way out",
)
def test_nccl_without_a_gpu_is_refused() -> None:
    fleet = connect(backend="nccl")
    try:
        with pytest.raises(UserError, match=r"nccl .* works between GPUs"):
            share_out(fleet, LayoutSection(device="cpu"), MachinesSection())
    finally:
        fleet.close()
