"""Which machines a run uses: from the names a person typed, or from a cluster file. Nothing is reached here.

A cluster file is a JSON object with `distributed_backend`, `node_list`, `master_addr` and `master_port`. h2oGPT keeps it as
`data/config.json`, beside rows; so a file of rows under that name must be told from it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.machines_section import MachinesSection

#: Where the cluster file lies when nobody says where.
DEFAULT = Path("data") / "config.json"
KEYS = ("distributed_backend", "node_list", "master_addr", "master_port")
#: Either of them makes a JSON object the description of a cluster.
_TELLING = {"distributed_backend", "node_list"}
_MAX_BYTES = 1 << 20
#: `name`, `user@name`, an address. It becomes a word of ssh's command line, so it never begins with a dash.
_HOST = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9_.:-]{0,252}")


@dataclass(frozen=True)
class Cluster:
    """The machines of a run, node 0 first. origin: where they were named. port: of node 0's store; None: any free one.

    backend: `nccl` or `gloo` as the file has it, or None.
    """

    hosts: tuple[str, ...]
    origin: str
    port: int | None = None
    backend: str | None = None


def choose_cluster(asked: MachinesSection, folder: Path) -> Cluster | None:
    """The machines that were asked for; None where it is this machine alone. folder: the working directory.

    Raises UserError: hosts that cannot be, a file that is no cluster file, nodes that nobody named.
    """
    cluster = _named(asked, folder)
    if asked.on == "local" and asked.hosts:
        raise UserError(
            f"on local trains on this machine alone, and hosts {','.join(asked.hosts)} are given: leave out one of them"
        )
    if cluster is None:
        _needs_no_hosts(asked)
        return None
    raise_if_any(_host_problems(cluster))
    if asked.nodes is not None and asked.nodes > len(cluster.hosts):
        raise UserError(
            f"nodes {asked.nodes} are asked for, and {cluster.origin} names {len(cluster.hosts)}: name more hosts, or give "
            f"--nodes {len(cluster.hosts)}"
        )
    hosts = cluster.hosts[: asked.nodes] if asked.nodes else cluster.hosts
    backend = asked.backend if asked.backend != "auto" else cluster.backend
    return Cluster(hosts, cluster.origin, cluster.port, backend)


def _needs_no_hosts(asked: MachinesSection) -> None:
    """Refuse what only makes sense with hosts."""
    where = f"give --hosts a,b, --cluster FILE, or a cluster file at {DEFAULT} (keys {', '.join(KEYS)})"
    if asked.on == "ssh":
        raise UserError(f"on ssh needs to know the machines: {where}")
    if asked.nodes is not None and asked.nodes > 1:
        raise UserError(f"nodes {asked.nodes} are asked for and no machine is named: {where}")


def _named(asked: MachinesSection, folder: Path) -> Cluster | None:
    if asked.hosts and asked.cluster:
        raise UserError(f"hosts {','.join(asked.hosts)} and cluster {asked.cluster} both name the machines: give one of them")
    if asked.hosts:
        return Cluster(asked.hosts, "hosts")
    if asked.cluster is not None:
        return read_cluster(Path(asked.cluster))
    default = folder / DEFAULT
    if asked.on == "local" or not default.is_file():
        return None
    must_be = asked.on == "ssh" or (asked.nodes or 1) > 1
    return read_cluster(default) if must_be or is_cluster_file(default) else None


def is_cluster_file(path: Path) -> bool:
    """Whether a file describes a cluster. A file of rows, of whatever size, does not."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return False
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(_TELLING & set(value))


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file. Raises one UserError with everything that is wrong."""
    value = _object(path)
    problems = [
        f"{path} has the key {key!r}, which means nothing: its keys are {', '.join(KEYS)}" for key in value if key not in KEYS
    ]
    nodes = value.get("node_list")
    if isinstance(nodes, str):
        nodes = [part.strip() for part in nodes.split(",") if part.strip()]
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, str) for node in nodes):
        problems.append(f'{path}: node_list must name the machines, as ["10.0.0.1", "10.0.0.2"]')
        nodes = []
    backend = value.get("distributed_backend")
    if backend not in (None, "nccl", "gloo"):
        problems.append(f"{path}: distributed_backend {backend!r} is not known: write nccl or gloo")
    master = value.get("master_addr")
    if master is not None and master not in nodes:
        problems.append(f"{path}: master_addr {master!r} is not in node_list: add it, or name one that is")
    port = _port(value.get("master_port"))
    if port is None and value.get("master_port") is not None:
        problems.append(f"{path}: master_port {value['master_port']!r} is no port: write a number from 1 to 65535")
    raise_if_any(problems)
    ordered = [master, *(node for node in nodes if node != master)] if master is not None else nodes
    if len(set(nodes)) < len(nodes):
        ordered = nodes  # a doubled host is told by whoever checks the hosts
    return Cluster(tuple(ordered), str(path), port, backend)


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError, also for a data set under the name of a cluster file."""
    what = f"a cluster file is a JSON object with {', '.join(KEYS)}"
    try:
        size = path.stat().st_size
        value = json.loads(path.read_bytes()) if size <= _MAX_BYTES else None
    except FileNotFoundError:
        raise UserError(f"the cluster file {path} does not exist: write it ({what}), or give --hosts a,b") from None
    except OSError as error:
        raise UserError(f"the cluster file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}): {what}") from None
    if isinstance(value, dict) and _TELLING & set(value):
        return value
    rows = f"a list of {len(value)} rows" if isinstance(value, list) else f"{size} bytes without those keys"
    raise UserError(
        f"{path} is a training data set or some other file ({rows}), and {what}: give the machines by --hosts a,b or another "
        "--cluster FILE, and rows by --data"
    )


def _port(value: object) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536 else None


def _host_problems(cluster: Cluster) -> list[str]:
    problems = [
        f"host {host!r} ({cluster.origin}) is no name of a machine: write name, address or user@name"
        for host in cluster.hosts
        if not _HOST.fullmatch(host)
    ]
    doubled = sorted({host for host in cluster.hosts if cluster.hosts.count(host) > 1})
    return problems + [f"host {host} ({cluster.origin}) is named twice: name each machine once" for host in doubled]
