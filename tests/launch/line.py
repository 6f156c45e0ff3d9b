"""A line from machine to machine where there is no sshd: what `ssh` is to fleetune, over plain TCP, for machines of the tests.

`python line.py listen ADDRESS PORT` runs, for each connection, the command in its first line, with the connection as standard
input and output. `connect PORT <words of ssh>` is the other end. Nothing is encrypted and anybody is let in: for tests alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading


def listen(address: str, port: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with socket.create_server((address, port)) as server:
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile("rb", buffering=0) as lines:
                said = lines.readline()
                if said:  # else somebody only looked whether this machine answers
                    words = ["sh", "-c", json.loads(said)]
                    subprocess.Popen(words, stdin=connection, stdout=connection, start_new_session=True)


def connect(port: int, words: list[str]) -> int:
    host, command = words[words.index("--") + 1], words[-1]
    if "-G" in words:
        print(f"hostname {host}")
        return 0
    try:
        line = socket.create_connection((host, port), 6)
    except OSError as error:
        print(f"ssh: connect to host {host} port {port}: {error}", file=sys.stderr)
        return 255
    line.settimeout(None)
    line.sendall(json.dumps(command).encode() + b"\n")

    def send() -> None:
        while data := os.read(0, 1 << 16):
            line.sendall(data)
        line.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    while data := line.recv(1 << 16):
        os.write(1, data)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(sys.argv[2], int(sys.argv[3]))
    sys.exit(connect(int(sys.argv[2]), sys.argv[3:]))
