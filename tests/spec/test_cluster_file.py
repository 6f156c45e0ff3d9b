from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetune.spec.cluster_file import choose_cluster, is_cluster_file, read_cluster
from fleetune.spec.errors import UserError
from fleetune.spec.machines_section import MachinesSection

WHOLE: dict[str, Any] = {
    "distributed_backend": "gloo",
    "node_list": ["10.0.0.2", "10.0.0.1"],
    "master_addr": "10.0.0.1",
    "master_port": "29500",
}


def write(folder: Path, value: Any, name: str = "data/config.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.claim(
    "H11",
    command="data/config.json",
    seen="the key is read; nccl or gloo",
)
def test_all_four_keys_count_and_the_master_comes_first(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, WHOLE))
    assert (cluster.hosts, cluster.port, cluster.backend) == (("10.0.0.1", "10.0.0.2"), 29500, "gloo")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"node_list": []}, "node_list must name"),
        ({"node_list": [1]}, "node_list must name"),
        ({"master_addr": "10.0.0.9"}, "is not in node_list"),
        ({"master_port": 70000}, "is no port"),
        ({"distributed_backend": "mpi"}, "is not known"),
        ({"nodes": 2}, "the key 'nodes', which means nothing"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_cluster(write(tmp_path, {**WHOLE, **changes}))


@pytest.mark.claim(
    "H12",
    command="fleetune train --cluster data/config.json",
    seen="a file of rows under that name is refused as what it is",
)
@pytest.mark.parametrize("rows", [[{"instruction": "a", "output": "b"}], {"input": "a", "output": "b"}])
def test_a_training_data_set_is_refused_as_cluster_file_and_otherwise_let_be(tmp_path: Path, rows: Any) -> None:
    path = write(tmp_path, rows)
    assert not is_cluster_file(path)
    with pytest.raises(UserError, match="is a training data set or some other file"):
        choose_cluster(MachinesSection(cluster=str(path)), tmp_path)
    with pytest.raises(UserError, match="is a training data set or some other file"):
        choose_cluster(MachinesSection(on="ssh"), tmp_path)
    assert choose_cluster(MachinesSection(), tmp_path) is None


def test_the_file_beside_the_data_is_found_unless_this_machine_alone_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    found = choose_cluster(MachinesSection(), tmp_path)
    assert found is not None and found.hosts == ("10.0.0.1", "10.0.0.2") and found.backend == "gloo"
    assert choose_cluster(MachinesSection(on="local"), tmp_path) is None
    one = choose_cluster(MachinesSection(nodes=1), tmp_path)
    assert one is not None and one.hosts == ("10.0.0.1",)
    nccl = choose_cluster(MachinesSection(backend="nccl"), tmp_path)
    assert nccl is not None and nccl.backend == "nccl"


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"hosts": ("a", "a")}, "host a .* is named twice"),
        ({"hosts": ("a", "-oProxyCommand=x")}, "'-oProxyCommand=x' .* is no name"),
        ({"hosts": ("a", "b;reboot")}, "is no name"),
        ({"hosts": ("a", "$(id)")}, "is no name"),
        ({"hosts": ("a", "u@-x")}, "is no name"),
        ({"hosts": ("a", "b\n")}, "is no name"),
        ({"hosts": ("a", "b"), "nodes": 3}, "nodes 3 are asked for, and hosts names 2"),
        ({"hosts": ("a",), "cluster": "x.json"}, "both name the machines"),
        ({"hosts": ("a",), "on": "local"}, "leave out one of them"),
        ({"on": "ssh"}, "needs to know the machines"),
        ({"nodes": 2}, "no machine is named"),
        ({"cluster": "absent.json"}, "does not exist"),
    ],
)
def test_hosts_that_cannot_be_are_told(tmp_path: Path, layout: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        choose_cluster(MachinesSection(**layout), tmp_path)


def test_the_first_so_many_hosts_are_used(tmp_path: Path) -> None:
    found = choose_cluster(MachinesSection(hosts=("a", "user@b", "10.0.0.3"), nodes=2), tmp_path)
    assert found is not None and found.hosts == ("a", "user@b")
