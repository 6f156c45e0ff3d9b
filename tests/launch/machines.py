"""Two machines on this one: network namespaces joined by a cable, each with its own name and mounts: a home, caches and runs
that the other does not see. Needs root, `ip`, `unshare` and `nsenter`. Each is reached through its door: an OpenSSH server, or,
where only the network matters, a line of our own that needs none (`line.py`)."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
SSHD = "/usr/sbin/sshd"
LINE = Path(__file__).resolve().parent / "line.py"
ADDRESSES = {"a": "10.99.0.1", "b": "10.99.0.2"}
NAMES = {"a": "node1", "b": "node2"}
PORT = 2222


def missing(door: str) -> str | None:
    """Why there can be no such machines here; None where there can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    for tool in ("ip", "unshare", "nsenter", *(("ssh", "ssh-keygen", SSHD) if door == "sshd" else ())):
        if shutil.which(tool) is None:
            return f"needs the program {tool}"
    return None


class Machines:
    """`a`, where commands are run, and `b`. folder: seen by both (models, data). runs: each machine's own.

    door: `sshd`, or `line`."""

    def __init__(self, folder: Path, door: str = "sshd") -> None:
        self.folder = folder
        self.door = door
        self.runs = folder / "runs"
        self.keys = folder / "ssh"
        self.names = {side: f"ft{os.getpid()}{side}" for side in "ab"}
        self._doors: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.runs.mkdir(parents=True)
        self.keys.mkdir(mode=0o700)
        (self.keys / "hosts").write_text("127.0.0.1 localhost\n10.99.0.1 node1\n10.99.0.2 node2\n")
        if self.door == "sshd":
            self._write_keys()
        else:
            ssh = self.keys / "ssh"
            ssh.write_text(f'#!/bin/sh\nexec {sys.executable} {LINE} connect {PORT} "$@"\n')
            ssh.chmod(0o755)
        self._namespaces()
        for side in "ab":
            self._start_door(side)

    def _write_keys(self) -> None:
        for key in ("id", "host", "stranger"):
            self._run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.keys / key))
        shutil.copy(self.keys / "id.pub", self.keys / "authorized_keys")
        (self.keys / "sshd_config").write_text(
            f"Port {PORT}\nHostKey {self.keys}/host\nAuthorizedKeysFile {self.keys}/authorized_keys\nStrictModes no\n"
            f"PasswordAuthentication no\nPermitRootLogin yes\nPidFile none\nLogLevel ERROR\nUsePAM no\n"
        )
        host_key = (self.keys / "host.pub").read_text()
        (self.keys / "known_hosts").write_text("".join(f"[{address}]:{PORT} {host_key}" for address in ADDRESSES.values()))
        Path("/run/sshd").mkdir(exist_ok=True)

    def ssh_config(self, *, key: str = "id", port: int = PORT) -> Path:
        path = self.keys / f"config-{key}-{port}"
        path.write_text(
            f"Host *\n  Port {port}\n  User root\n  IdentityFile {self.keys}/{key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.keys}/known_hosts\n  StrictHostKeyChecking yes\n"
        )
        return path

    def within(self, side: str, *words: str | Path) -> list[str]:
        """The words of a command as it is run on one of the machines."""
        enter = ["nsenter", "--target", str(self._doors[side].pid), "--mount", "--net", "--uts"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *map(str, words)]

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("FLEETUNE_CACHE", "XDG_CACHE_HOME")}
        return {
            **kept,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(Path("~root").expanduser()),
            "PATH": os.pathsep.join([*([str(self.keys)] if self.door == "line" else []), kept["PATH"]]),
        }

    def start_command(self, *words: str | Path, side: str = "a", **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.within(side, *words),
            cwd=self.folder,
            env={**self.environment(), **environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def fleetune(self, *words: str | Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        process = self.start_command(sys.executable, "-m", "fleetune.cli.main", *words)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()) from None
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def read(self, side: str, path: Path) -> str:
        return subprocess.run(self.within(side, "cat", path), capture_output=True, text=True, check=True).stdout

    def listing(self, side: str, path: Path) -> list[str]:
        done = subprocess.run(self.within(side, "ls", "-A", path), capture_output=True, text=True, check=False)
        return done.stdout.split()

    def cable(self, state: str) -> None:
        """`up` or `down`."""
        self._run("ip", "-n", self.names["a"], "link", "set", "va", state)

    def network(self, side: str, *words: str) -> None:
        """Change the network of a machine: the words of `ip` or `tc`, the program first."""
        self._run(words[0], "-n", self.names[side], *words[1:])

    def processes(self, side: str) -> list[int]:
        """Python processes of ours that live on a machine: those in its network."""
        network = os.readlink(f"/proc/{self._doors[side].pid}/ns/net")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns" / "net") == network:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                    if any(word.startswith(b"fleetune.") for word in words) and not is_zombie:
                        found.append(int(entry.name))
            except OSError:
                continue
        return found

    def listening(self, side: str) -> set[str]:
        """Addresses on which something other than sshd listens."""
        done = subprocess.run(self.within(side, "ss", "-Hltn"), capture_output=True, text=True, check=True)
        found = {line.split()[3] for line in done.stdout.splitlines()}
        return {address for address in found if not address.endswith(f":{PORT}")}

    def stop(self) -> None:
        for side, process in self._doors.items():
            for pid in self.processes(side):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _namespaces(self) -> None:
        for name in self.names.values():
            self._run("ip", "netns", "add", name)
        first, second = self.names["a"], self.names["b"]
        self._run("ip", "link", "add", "va", "netns", first, "type", "veth", "peer", "name", "vb", "netns", second)
        for side, name in self.names.items():
            self._run("ip", "-n", name, "link", "set", "lo", "up")
            self._run("ip", "-n", name, "link", "set", f"v{side}", "up")
            self._run("ip", "-n", name, "addr", "add", f"{ADDRESSES[side]}/24", "dev", f"v{side}")

    def _start_door(self, side: str) -> None:
        home = Path("~root").expanduser()
        needed = (SOURCE, Path(sys.prefix), Path(sys.base_prefix), self.folder)
        own = home / ".cache" if any(path.is_relative_to(home) for path in needed) else home
        own.mkdir(exist_ok=True)
        script = (
            f"mount -t tmpfs tmpfs {own} && mount -t tmpfs tmpfs {self.runs} && mount --bind {self.keys}/hosts /etc/hosts && "
        )
        script += f"echo {NAMES[side]} > /proc/sys/kernel/hostname && "
        if self.door == "sshd":
            script += f"exec {SSHD} -D -e -f {self.keys}/sshd_config"
        else:
            script += f"exec {sys.executable} {LINE} listen {ADDRESSES[side]} {PORT}"
        log = os.open(self.keys / f"door-{side}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        self._doors[side] = subprocess.Popen(
            ["ip", "netns", "exec", self.names[side], "unshare", "-m", "-u", "--propagation", "private", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self.environment(),
        )
        deadline = time.monotonic() + 30
        while not self._answers(side):
            said = (self.keys / f"door-{side}.log").read_text()
            assert self._doors[side].poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)

    def _answers(self, side: str) -> bool:
        other = f"import socket; socket.create_connection(('{ADDRESSES[side]}', {PORT}), 1).close()"
        done = subprocess.run(
            ["ip", "netns", "exec", self.names[side], sys.executable, "-c", other], capture_output=True, check=False
        )
        return done.returncode == 0

    def _run(self, *words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)


@contextmanager
def two_machines(folder: Path, door: str = "sshd") -> Iterator[Machines]:
    why = missing(door)
    if why is not None:
        pytest.skip(f"two machines in network namespaces: {why}")
    machines = Machines(folder, door)
    try:
        try:
            machines.start()
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"two machines in network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
        yield machines
    finally:
        machines.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
