"""On prepared weights nothing is asked of any network: a run reaches its own processes through loopback, and nobody else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from journeys.journey import SMALL, environment_of, fleetune, losses, write_rows

#: Python imports it at its start, in every process of the run: it writes down who is called or looked up.
WATCH = """
import json, os, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        address = arguments[0] if event in ("socket.getaddrinfo", "socket.gethostbyname") else arguments[1]
        host = address[0] if isinstance(address, tuple) else address
        with open(os.environ["CALLED"], "a") as file:
            file.write(json.dumps([event, str(host)]) + "\\n")

sys.addaudithook(watch)
"""
LOOPBACK = {"127.0.0.1", "::1", "localhost", "None"}


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """The environment of a run in which each Python process writes down who it calls."""
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
    environment = environment_of({"CALLED": str(tmp_path / "called")})
    environment.pop("HF_HUB_OFFLINE")  # fleetune itself must see to it
    environment["PYTHONPATH"] = f"{tmp_path / 'watch'}:{environment['PYTHONPATH']}"
    return environment


def called(folder: Path) -> set[str]:
    path = folder / "called"
    return {json.loads(line)[1] for line in path.read_text().splitlines()} if path.exists() else set()


def words_of(model: Path, folder: Path, *more: str) -> list[str]:
    write_rows(folder / "rows.jsonl", 16)
    words = ["train", "--model", str(model), "--data", "rows.jsonl", "--max-steps", "2", *more, *SMALL]
    return [sys.executable, "-m", "fleetune.cli.main", *words]


def test_the_watch_sees_a_call(tmp_path: Path, watched: dict[str, str]):
    code = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.7', 9))"
    subprocess.run([sys.executable, "-c", code], env=watched, check=False, timeout=60, capture_output=True)
    assert called(tmp_path) == {"192.0.2.7"}


def test_a_run_on_prepared_weights_calls_nobody(tmp_path: Path, tiny_llama: Path, watched: dict[str, str]):
    command = words_of(tiny_llama, tmp_path, "--run", "run", "--validation-share", "0.2", "--exact-match", "--gpus", "2")
    done = subprocess.run(command, cwd=tmp_path, env=watched, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    own = {name for name in called(tmp_path) if not name.startswith("/")}  # a path is a socket of this machine
    assert own <= LOOPBACK, own


@pytest.mark.claim(
    "H42",
    command="fleetune train",
    seen="a run without any network but loopback",
)
def test_a_run_needs_no_network_but_loopback(tmp_path: Path, tiny_llama: Path):
    """In a network namespace that has nothing but loopback, the native libraries too can reach nobody."""
    alone = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("no unshare or ip here: a network namespace cannot be made")
    if subprocess.run([*alone, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("this machine lets nobody make a network namespace")
    command = words_of(tiny_llama, tmp_path, "--run", "alone", "--gpus", "2")
    done = subprocess.run([*alone, *command], cwd=tmp_path, env=environment_of({}), text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    again = fleetune(*command[3:], "--run", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "alone") == losses(tmp_path / "again")
