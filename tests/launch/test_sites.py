from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fleetune.launch import checks, link
from fleetune.launch.facts import infiniband, machine_facts
from fleetune.launch.forward import Forwarder, receive
from fleetune.launch.link import Link
from fleetune.launch.pairs import PairTests
from fleetune.launch.ssh_site import SshSite
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder


def two_ends() -> tuple[Link, Link, int]:
    """Both ends of a line, and the descriptor whose closing ends it."""
    (near_read, far_write), (far_read, near_write) = os.pipe(), os.pipe()
    return Link(near_read, near_write), Link(far_read, far_write), near_write


def wait_for_rows(end: Link, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + 20
    while len(rows) < count:
        rows += end.take()
        assert time.monotonic() < deadline and end.why_ended is None, end.why_ended
        time.sleep(0.01)
    return rows


def test_rows_of_any_size_arrive_in_order_in_both_directions() -> None:
    near, far, near_write = two_ends()
    big = {"text": "ä\n" * 400_000}
    near.send(big)
    near.send({"number": 2})
    far.send({"answer": 1})
    assert wait_for_rows(far, 2) == [big, {"number": 2}]
    assert wait_for_rows(near, 1) == [{"answer": 1}]
    near.close()
    os.close(near_write)
    deadline = time.monotonic() + 10
    while far.why_ended is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert far.why_ended == "the other side ended"


def test_a_silent_side_is_lost_and_a_beating_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BEAT_S", 0.1)
    monkeypatch.setattr(link, "SILENCE_S", 2.0)
    near, far, _ = two_ends()
    read_end, write_end = os.pipe()
    deaf = Link(read_end, os.open(os.devnull, os.O_WRONLY))
    os.write(write_end, b"{}\n")
    time.sleep(2.5)
    assert deaf.is_lost and deaf.why_ended is None
    assert not near.is_lost and not far.is_lost
    for end in (near, far, deaf):
        end.close()
    os.close(write_end)


def test_what_a_login_shell_prints_is_passed_over_and_nonsense_afterwards_is_not() -> None:
    read_end, write_end = os.pipe()
    end = Link(read_end, os.open(os.devnull, os.O_WRONLY), is_strict=False)
    os.write(write_end, b'Welcome to node b!\n{"hello": 1}\n')
    assert wait_for_rows(end, 1) == [{"hello": 1}] and list(end.noise) == ["Welcome to node b!"]
    os.write(write_end, b"nonsense\n")
    deadline = time.monotonic() + 10
    while end.why_ended is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "no JSON" in end.why_ended


def test_the_remote_command_is_one_quoted_line_and_a_host_is_never_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "/tmp/a b;$(touch x)`id`'\"\n-oProxyCommand=x"
    monkeypatch.setenv("PYTHONPATH", hostile)
    argv = SshSite().argv("user@b")
    assert argv[-3:-1] == ["--", "user@b"]
    assert shlex.split(argv[-1]) == ["exec", "env", f"PYTHONPATH={hostile}", sys.executable, "-m", "fleetune.launch.node"]
    assert "BatchMode=yes" in argv


def test_an_ssh_configuration_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        SshSite(str(tmp_path / "absent"))


def test_only_who_knows_the_token_is_answered() -> None:
    here = PairTests()
    port = here.listen("127.0.0.1", "a" * 64)["port"]
    right = here.measure("localhost", "127.0.0.1", port, "a" * 64, "127.0.0.1")
    assert right["rtt_s"] > 0 and right["bytes_per_s"] > 1e6 and right["route"] == "127.0.0.1" and right["name_resolves"]
    assert "error" in here.measure("localhost", "127.0.0.1", port, "b" * 64, "127.0.0.1")
    here.close()
    assert "refuses port" in here.measure("localhost", "127.0.0.1", port, "a" * 64, "127.0.0.1")["error"]


def test_logs_are_forwarded_as_they_grow_and_a_node_can_write_nowhere_else(tmp_path: Path) -> None:
    node, home = RunFolder(tmp_path / "node"), RunFolder(tmp_path / "home")
    node.create()
    home.create()
    (node.logs / "old-attempt-000.log").write_text("of an earlier run\n")
    near, far, _ = two_ends()
    forwarder = Forwarder(node, far)
    log = node.log(1, 0)
    log.write_bytes(b"first \xff\n")
    forwarder.forward(now=True)
    with open(log, "ab") as file:
        file.write(b"second\n")
    node.outcome(1, 0).write_text('{"version": 1}')
    forwarder.forward(now=True)
    for row in wait_for_rows(near, 3):
        receive(home, row)
    assert home.log(1, 0).read_bytes() == b"first \xff\nsecond\n"
    assert home.outcome(1, 0).read_text() == '{"version": 1}'
    assert not (home.logs / "old-attempt-000.log").exists()
    for room, name in (("logs", "../run.yaml"), ("checkpoints", "x"), ("logs", "-x"), ("logs", "a/b")):
        with pytest.raises(ValueError, match="a node sent"):
            receive(home, {"file": [room, name], "whole": ""})
    near.close()
    far.close()
    assert threading.active_count() < 20


@pytest.mark.claim(
    "H9",
    command="fleetune doctor --hosts a,b",
    seen="another Python, torch, CUDA or code on one of them is an error that names both",
)
def test_machines_are_compared_by_what_decides_over_numbers() -> None:
    facts = machine_facts()
    other = {**facts, "packages": {**facts["packages"], "torch": "2.9.1"}, "python": "3.9.1", "code": "x"}
    told = [finding.line() for finding in checks.check_equality([("a", facts), ("b", other)])]
    assert [line.split(": ")[1].split(" is ")[0] for line in told] == ["Python", "torch", "fleetune's own code"]
    assert not [finding for finding in checks.check_equality([("a", facts), ("b", facts)]) if finding.level == "error"]


def test_versions_with_known_holes_are_warned_of() -> None:
    facts = machine_facts()
    old = {**facts, "packages": {**facts["packages"], "torch": "2.5.1+cu121", "transformers": "5.2.9", "jinja2": "3.1.5"}}
    told = [finding for finding in checks.check_machine("a", old) if "older than" in finding.text]
    assert [finding.text.split()[0] for finding in told] == ["torch", "transformers", "jinja2"]
    assert all(finding.level == "warning" and finding.fix for finding in told)
    assert not [finding for finding in checks.check_machine("a", facts) if "older than" in finding.text]


@pytest.mark.claim(
    "H6",
    command="fleetune doctor",
    seen="the distribution is told; another system, or an older Ubuntu, is warned of",
)
def test_the_system_is_told_and_an_old_one_is_warned_of() -> None:
    facts = machine_facts()
    assert facts["system"].startswith("Linux ") and facts["distribution"]
    for distribution, is_told in (("Ubuntu 18.04.6 LTS", True), ("Ubuntu 20.04 LTS", False), ("Debian GNU/Linux 12", False)):
        found = checks.check_machine("a", {**facts, "distribution": distribution})
        told = [finding for finding in found if "older than Ubuntu 20.04" in finding.text]
        assert bool(told) == is_told and all(finding.level == "warning" and finding.fix for finding in told)
    (other,) = [f for f in checks.check_machine("a", {**facts, "system": "Darwin 23.1"}) if "no Linux" in f.text]
    assert other.level == "warning"


@pytest.mark.claim(
    "H7",
    command="fleetune doctor",
    seen="a GPU below 16 GB is a warning, CUDA below 11.7 an error, no GPU a note",
)
def test_small_gpus_and_an_old_cuda_are_told_and_a_cpu_is_enough() -> None:
    facts = {**machine_facts(), "cuda": "12.8", "visible_gpus": 1}
    card = {"name": "Tesla T4", "memory_bytes": 8 << 30, "used_bytes": 0}
    (small,) = [f for f in checks.check_machine("a", {**facts, "gpus": [card]}) if "less than the 16 GB" in f.text]
    assert small.level == "warning" and "Tesla T4" in small.text
    enough = {**card, "memory_bytes": 16 << 30}
    assert not [f for f in checks.check_machine("a", {**facts, "gpus": [enough]}) if "less than" in f.text]
    (old,) = [f for f in checks.check_machine("a", {**facts, "gpus": [], "cuda": "11.6"}) if "CUDA 11.6" in f.text]
    assert old.level == "error" and "older than 11.7" in old.text
    without = {**facts, "gpus": [], "visible_gpus": 0, "cuda": None}
    (cpu,) = [finding for finding in checks.check_machine("a", without) if "CPU cores" in finding.text]
    assert cpu.level == "note"


@pytest.mark.claim(
    "X28",
    command="fleetune doctor",
    seen="ports of InfiniBand and RoCE cards are found, and told where they are not active",
)
def test_infiniband_and_roce_ports_are_seen(tmp_path: Path) -> None:
    for device, layer, state in (("mlx5_0", "InfiniBand", "4: ACTIVE"), ("mlx5_1", "Ethernet", "1: DOWN")):
        port = tmp_path / "class" / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(layer + "\n")
        (port / "state").write_text(state + "\n")
    found = infiniband(tmp_path)
    assert [(port["kind"], port["active"]) for port in found] == [("InfiniBand", True), ("RoCE", False)]
    told = checks.check_machine("a", {**machine_facts(), "infiniband": found})
    assert any("RoCE mlx5_1 port 1 is not active" in finding.text for finding in told)


@pytest.mark.claim(
    "H8",
    command="fleetune doctor --hosts a,b",
    seen="less than 1 Gbit/s is a warning that names both ends and says that an adapter needs less",
)
def test_machines_with_disks_of_their_own_are_named() -> None:
    assert "they share" in checks.check_shared("/runs", [("a", True), ("b", True)]).text
    apart = checks.check_shared("/runs", [("a", True), ("b", False), ("c", True)])
    assert apart.about == "b" and "checkpoints and results lie on a" in apart.text and apart.level == "note"


def test_a_slow_or_cut_way_between_two_machines_is_told_by_both_names() -> None:
    (slow,) = checks.check_pair("a", "b", {"bytes_per_s": 5e6, "rtt_s": 0.0001})
    assert slow.about == "a to b" and "0.04 Gbit/s" in slow.text and slow.level == "warning"
    (cut,) = checks.check_pair("a", "b", {"error": "b refuses port 5: a firewall rejects it"})
    assert cut.level == "error" and cut.fix
    (skewed,) = checks.check_clock("b", 61.0)
    assert "+61.0 s" in skewed.text
    assert checks.check_clock("b", 0.2) == []
