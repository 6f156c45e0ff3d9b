"""The store in which the ranks of a run find each other, as a process of its own.

torch's store has no password and would listen on every interface. So the socket is bound here, to one chosen address,
before torch gets it.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import threading
from datetime import timedelta


def main(arguments: list[str]) -> int:
    """Serve until the supervisor ends this process. Tells `{"host", "port"}` as one line of JSON on the report pipe."""
    parser = argparse.ArgumentParser(prog="fleetune.parallel.store")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    listener = bind(options.host, options.port)
    port = listener.getsockname()[1]
    from torch.distributed import TCPStore

    # torch closes the descriptor, so it must be the only owner.
    store = TCPStore(
        options.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    os.write(options.report_fd, json.dumps({"host": options.host, "port": store.port}).encode() + b"\n")
    os.close(options.report_fd)
    threading.Event().wait()
    return 0


def bind(host: str, port: int = 0) -> socket.socket:
    """A listening socket on one address; port 0: any free one. Raises ValueError for an address that means every interface,
    OSError for a port that is taken."""
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address[4][0]).is_unspecified:
        raise ValueError(f"{host} means every interface of this machine, and the store has no password: give one address")
    listener = socket.socket(address[0], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier store may linger on a fixed port
    listener.bind(address[4])
    listener.listen(1024)
    return listener
