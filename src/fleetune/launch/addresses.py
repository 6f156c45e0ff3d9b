"""Names, addresses and interfaces of machines, as the system tells them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping

from fleetune.spec.errors import UserError


def resolve(host: str) -> str:
    """The address of a host's name (IPv4 where there is one). Raises UserError."""
    name = host.rpartition("@")[2]
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"host {name} has no address ({why}): check its spelling, give its address, or add it to /etc/hosts"
        ) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_own(address: str) -> bool:
    """Whether this machine has the address: only then a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def route_to(address: str) -> str | None:
    """This machine's own address on the way to another; None where there is no way. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface that has an address of this machine; None where no interface lists it."""
    import psutil

    if ipaddress.ip_address(address).is_loopback:
        return next((name for name in psutil.net_if_addrs() if name in ("lo", "lo0")), None)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_public(address: str) -> bool:
    """Whether an address can be reached from the whole internet."""
    return ipaddress.ip_address(address).is_global


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Under somebody else's torchrun: the interface on the way to the master. gloo would take whatever the machine's own
    name stands for, which many systems make 127.0.1.1."""
    try:
        route = route_to(resolve(environment["MASTER_ADDR"]))
    except (KeyError, UserError):
        return
    interface = interface_of(route) if route is not None else None
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)
