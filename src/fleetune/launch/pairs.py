"""Two machines talk for a moment: can they, by which way, how fast. Plain sockets, no torch.

One side listens on one address and a free port, and answers only who shows the token that both got from the driver.
"""

from __future__ import annotations

import hmac
import socket
import statistics
import threading
import time
from contextlib import suppress
from typing import Any, final

from fleetune.launch.addresses import is_own, route_to

CONNECT_S = 4.0
_ANSWER_S = 10.0
_NUM_PINGS = 21
_FIRST_BYTES = 4 << 20
#: Sent when the first bytes went through in less than this: a fast link needs more to be measured.
_QUICK_S = 0.15
_MORE_BYTES = 48 << 20
_BLOCK = bytes(1 << 18)


@final
class PairTests:
    """This machine's part in the tests of all pairs."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def listen(self, address: str, token: str) -> dict[str, Any]:
        """Answer others on `address`, until `close`. Returns `{"port"}`, or `{"error"}`."""
        self.close()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(64)
        except OSError as error:
            listener.close()
            return {"error": f"it cannot listen on {address}: {error.strerror}"}
        self._listener = listener
        threading.Thread(target=_serve, args=(listener, token.encode()), name="pair tests", daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def measure(self, name: str, address: str, port: int, token: str, own: str) -> dict[str, Any]:
        """Talk to a machine that listens. Times in seconds, speed in bytes a second; `error` where it does not work.

        name: under which this machine may look it up. own: this machine's address for the run.
        """
        route = route_to(address)
        row: dict[str, Any] = {"route": route, "name_resolves": _resolves(name)}
        try:
            with socket.create_connection((address, port), CONNECT_S, (own, 0)) as line:
                line.settimeout(_ANSWER_S)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(token.encode())
                return {**row, "rtt_s": _round_trip(line), "bytes_per_s": _speed(line)}
        except TimeoutError:
            return {
                **row,
                "error": f"no answer from {address} port {port} within {CONNECT_S:.0f} s: a firewall, or a cut way",
            }
        except ConnectionRefusedError:
            return {
                **row,
                "error": f"{address} refuses port {port}: a firewall rejects it, or the address is another machine's",
            }
        except OSError as error:
            return {**row, "error": f"{address} port {port}: {error.strerror or error}"}

    def close(self) -> None:
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
            self._listener.close()
            self._listener = None


def port_problem(address: str, port: int) -> str | None:
    """Why a fixed port of this machine cannot be listened on; None where it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            return str(error.strerror) if is_own(address) else f"this machine has no address {address}"
    return None


def _serve(listener: socket.socket, token: bytes) -> None:
    while True:
        try:
            line, _ = listener.accept()
        except OSError:
            return  # closed
        threading.Thread(target=_answer, args=(line, token), daemon=True).start()


def _answer(line: socket.socket, token: bytes) -> None:
    with line, suppress(OSError):
        line.settimeout(_ANSWER_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_read(line, len(token)), token):
            return
        while order := line.recv(1):
            if order == b"p":
                line.sendall(b"p")
            elif order == b"b":
                left = int.from_bytes(_read(line, 8), "big")
                while left > 0:
                    piece = line.recv(min(left, 1 << 18))
                    if not piece:
                        return
                    left -= len(piece)
                line.sendall(b"b")
            else:
                return


def _round_trip(line: socket.socket) -> float:
    """Median of several round trips of one byte, in seconds; the first warms up."""
    times = []
    for _ in range(_NUM_PINGS):
        began = time.perf_counter()
        line.sendall(b"p")
        _read(line, 1)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _speed(line: socket.socket) -> float:
    """Bytes a second of one stream."""
    seconds = _send(line, _FIRST_BYTES)
    if seconds > _QUICK_S:
        return _FIRST_BYTES / seconds
    return _MORE_BYTES / _send(line, _MORE_BYTES)


def _send(line: socket.socket, num_bytes: int) -> float:
    began = time.perf_counter()
    line.sendall(b"b" + num_bytes.to_bytes(8, "big"))
    for _ in range(num_bytes // len(_BLOCK)):
        line.sendall(_BLOCK)
    _read(line, 1)
    return time.perf_counter() - began


def _read(line: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many bytes. Raises ConnectionError at the end of the line."""
    data = b""
    while len(data) < num_bytes:
        piece = line.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionError("the other side closed the line")
        data += piece
    return data


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True
