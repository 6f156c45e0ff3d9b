"""Who else computes: this process's place among the ranks, and the few things that ranks say to each other."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from fleetune.launch.addresses import choose_interface
from fleetune.spec.errors import UserError
from fleetune.spec.layout import Coordinates, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: `host:port` of our store process, set by our agent. Absent under somebody else's torchrun.
STORE_VARIABLE = "FLEETUNE_STORE"

#: A message between ranks is control, not data; a larger one is a mistake.
MAX_MESSAGE_BYTES = 256 << 20

_LEAVE_S = 5.0
_CONNECT_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where a process stands. node: number of its machine. num_nodes: machines of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0
    num_nodes: int = 1

    @staticmethod
    def from_environment() -> Place:
        """As torch elastic's agent, ours or another, tells it."""

        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
        return Place(
            rank=rank,
            world_size=world_size,
            local_rank=number("LOCAL_RANK", rank),
            node=number("GROUP_RANK", 0),
            num_nodes=number("GROUP_WORLD_SIZE", 1),
        )


@final
class World:
    """All ranks of one attempt. In a world of one there is no process group, and every method returns at once.

    Every method but `leave` is collective: all ranks call it, in the same order. Messages are JSON in byte tensors over
    gloo on the CPU, so they neither wait for a GPU nor unpickle anything. Where a peer dies, they raise RuntimeError.

    layout: how the model is spread over the ranks; without one, each holds all of it (`replicate`).
    bytes_sent: bytes that this rank has given to collectives since it joined.
    """

    def __init__(self, place: Place, device: torch.device, layout: Layout | None = None) -> None:
        self.layout = layout or Layout(replicate=place.world_size)
        if self.layout.world_size != place.world_size:
            raise ValueError(f"{self.layout.describe()} is no layout of {place.world_size} processes")
        self.place = place
        self.device = device
        self.bytes_sent = 0

    @staticmethod
    def join(
        *, attempt: int = 0, device: str = "cpu", backend: str = "auto", layout: Layout | None = None, timeout_s: float = 1800.0
    ) -> World:
        """Find the other ranks, through the environment that an agent has set. All ranks of the attempt.

        device: `cpu` or `cuda`; each process of a node takes its own GPU. backend: what carries the device's tensors,
        `nccl` or `gloo`; auto: the device's own. timeout_s: a collective in which a peer hangs
        raises after so long (one whose peer dies raises at once).
        """
        place = Place.from_environment()
        where = torch.device("cuda", place.local_rank) if device == "cuda" else torch.device(device)
        if where.type == "cuda":
            torch.cuda.set_device(where)
        if place.world_size > 1:
            _join_group(place, attempt, backend_of(where.type, backend), timedelta(seconds=timeout_s))
        return World(place, where, layout)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    @property
    def node(self) -> int:
        return self.place.node

    @property
    def data_rank(self) -> int:
        """Which share of every step is this rank's; its tensor and pipeline peers have the same."""
        return self.layout.data_rank(self.place.rank)

    @property
    def data_ranks(self) -> int:
        """Into how many shares a step is divided."""
        return self.layout.data_ranks

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands in the layout."""
        return self.layout.coordinates(self.place.rank)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks as torch's mesh, with the layout's axes by name; making it makes its groups, so all ranks ask first at the
        same point. Raises RuntimeError in a world of one without a process group."""
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            raise RuntimeError("a mesh needs a process group, and a world of one has none")
        sizes = self.layout.sizes()
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.sum([0])

    def any(self, flag: bool) -> bool:
        """Whether any rank says True."""
        return self.max([float(flag)])[0] > 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in double precision: counts are exact up to 2**53."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum_shares(self, values: Sequence[float]) -> list[float]:
        """Sums over the data ranks, on every rank: where tensor or pipeline peers say the same of one share, it counts once."""
        return self.sum(values if self.layout.speaks(self.rank) else [0.0] * len(values))

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of each over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum_tensor(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, on this world's device, by its sum over all ranks, the same to the last bit on each."""
        if self.world_size > 1:
            self.count_sent(tensor)
            dist.all_reduce(tensor)

    def sum_over(self, axis: str, tensor: torch.Tensor) -> None:
        """Replace a tensor, on this world's device, by its sum over this rank's peers along one axis of the layout."""
        if self.layout.sizes()[axis] > 1:
            self.count_sent(tensor)
            dist.all_reduce(tensor, group=self.mesh.get_group(axis))

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's value, on every rank. What the others give is not looked at."""
        if self.world_size == 1:
            return value
        message = encode(value) if self.rank == 0 else b""
        length = int(self.sum([len(message)])[0])
        data = as_bytes(message) if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
        if self.rank == 0:
            self.count_sent(data)
        dist.broadcast(data, src=0)
        return decode(data)

    def gather_json(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on every rank."""
        if self.world_size == 1:
            return [value]
        message = encode(value)
        lengths = [0.0] * self.world_size
        lengths[self.rank] = len(message)
        sizes = [int(length) for length in self.sum(lengths)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(message)] = as_bytes(message)
        parts = [torch.empty_like(padded) for _ in sizes]
        self.count_sent(padded)
        dist.all_gather(parts, padded)
        return [decode(part[:size]) for part, size in zip(parts, sizes)]

    def leave(self) -> None:
        """Let go of the group. Not collective, never raises, and never takes longer than 5 s, whatever the peers do."""
        if self.world_size == 1 or not dist.is_initialized():
            return
        thread = threading.Thread(target=_destroy, name="leave", daemon=True)
        thread.start()
        thread.join(_LEAVE_S)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.world_size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor([float(value) for value in values], dtype=torch.float64)
        self.count_sent(tensor)
        dist.all_reduce(tensor, op=operation)
        return [float(value) for value in tensor.tolist()]

    def count_sent(self, tensor: torch.Tensor) -> None:
        """Add what this rank gave to a collective that somebody else calls (FSDP's)."""
        self.bytes_sent += tensor.numel() * tensor.element_size()


def backend_of(device: str, backend: str) -> str:
    """torch's words for what carries tensors: messages between ranks always go over gloo on the CPU. Raises UserError."""
    if device == "cuda":
        return f"cpu:gloo,cuda:{'nccl' if backend == 'auto' else backend}"
    if backend == "nccl":
        raise UserError("backend nccl works between GPUs, and this run computes on the CPU: give --backend gloo")
    return "gloo"


def _join_group(place: Place, attempt: int, backend: str, timeout: timedelta) -> None:
    if place.num_nodes == 1:
        # Nothing of a run on one machine is to be heard outside it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        choose_interface(os.environ)
    check_interfaces(os.environ)
    # A prefix of its own for each attempt: addresses of an earlier one must not be read.
    store = dist.PrefixStore(f"attempt-{attempt}", _connect(timeout))
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


def connect(endpoint: str, timeout: timedelta) -> dist.TCPStore:
    """A client of the store at `host:port`. timeout: of what is asked later; a store that is gone is noticed in a minute."""
    host, _, port = endpoint.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set_timeout(timeout)
    return store


def _connect(timeout: timedelta) -> dist.Store:
    endpoint = os.environ.get(STORE_VARIABLE)
    if endpoint is not None:
        return connect(endpoint, timeout)
    check_address(os.environ)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except RuntimeError as error:
        if "in use" not in str(error):
            raise
        raise UserError(
            f"port {os.environ['MASTER_PORT']} of MASTER_ADDR {os.environ['MASTER_ADDR']} is in use already: give the launcher "
            "another port"
        ) from None
    return dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def check_interfaces(environment: Mapping[str, str]) -> None:
    """Raise UserError where a variable of the ranks' network names an interface that this machine does not have."""
    present = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        absent = [name for name in environment.get(variable, "").split(",") if name and name not in present]
        if absent:
            raise UserError(
                f"{variable} names {absent[0]!r}, and the interfaces of this machine are {', '.join(present)}: give one of "
                "them, or unset it"
            )


def check_address(environment: Mapping[str, str]) -> None:
    """Raise UserError where the address that another launcher gives does not resolve; torch would try it for half an hour."""
    name = environment.get("MASTER_ADDR", "")
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR {name!r} cannot be resolved on this machine ({error.strerror}): give the launcher an address, or a "
            "name that /etc/hosts or the name server knows"
        ) from None


def _destroy() -> None:
    try:
        dist.destroy_process_group()
    except Exception as error:  # whoever leaves does not care any more; the message may still help
        print(f"leaving the process group: {error}", file=sys.stderr)


def encode(value: Any) -> bytes:
    message = json.dumps(value).encode("utf-8")
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message)} bytes between ranks is over the limit of {MAX_MESSAGE_BYTES}")
    return message


def as_bytes(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
