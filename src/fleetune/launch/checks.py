"""What is wrong with a machine, or between machines, in plain words and with a fix each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Facts = Mapping[str, Any]

#: Oldest versions without a known hole through which a model or a data set can run code.
SAFE_VERSIONS = {"torch": "2.10", "transformers": "5.3", "jinja2": "3.1.6"}
OLDEST = {"python": "3.10", "cuda": "11.7", "ubuntu": "20.04"}
#: Advised, not demanded: a small model fits in less.
GPU_BYTES = 15 << 30
_SHM_BYTES = 256 << 20
_DISK_BYTES = 5 << 30
_MEMORY_BYTES = 2 << 30
_SKEW_S = 5.0
#: One Gbit/s, less what its headers take.
_FAST_BYTES_PER_S = 100e6
_SLOW_RTT_S = 0.005


@dataclass(frozen=True)
class Finding:
    """error: it will not work. warning: it may not, or badly. note: good to know. fix: what to do, as an imperative."""

    level: Literal["error", "warning", "note"]
    about: str
    text: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.about}: {self.text}" + (f". {self.fix}" if self.fix else "")


def check_machine(name: str, facts: Facts) -> list[Finding]:
    """Findings about one machine alone."""
    found = [*_system(name, facts), *_versions(name, facts), *_devices(name, facts)]
    if facts["available_bytes"] < _MEMORY_BYTES:
        found.append(
            Finding("warning", name, f"only {gigabytes(facts['available_bytes'])} of memory are free", "End other programs")
        )
    shm = facts.get("shm_free_bytes")
    if shm is not None and shm < _SHM_BYTES:
        fix = "Give the container more (--shm-size=1g for docker)"
        found.append(
            Finding("warning", name, f"/dev/shm has only {gigabytes(shm)} free, and processes share memory there", fix)
        )
    for port in facts["infiniband"]:
        state = "active" if port["active"] else f"not active ({port.get('state', 'no state')})"
        level: Literal["note", "warning"] = "note" if port["active"] else "warning"
        fix = "" if port["active"] else "Check the cable and the subnet manager, or nccl will use Ethernet"
        found.append(Finding(level, name, f"{port['kind']} {port['device']} port {port['port']} is {state}", fix))
    return found


def check_disks(name: str, disks: Sequence[Facts]) -> list[Finding]:
    found = []
    for disk in disks:
        if not disk["writable"]:
            found.append(
                Finding("error", name, f"{disk['folder']} cannot be written to", "Choose another place (--run, FLEETUNE_CACHE)")
            )
        elif disk["free_bytes"] < _DISK_BYTES:
            text = f"the disk of {disk['folder']} has {gigabytes(disk['free_bytes'])} free"
            found.append(Finding("warning", name, text, "Free some, or choose another place (--run, FLEETUNE_CACHE)"))
    return found


def check_shared(folder: str, sees: Sequence[tuple[str, bool]]) -> Finding:
    """sees: whether each machine, the first one first, sees what the first one writes there."""
    first, *others = sees
    apart = [name for name, does in others if not does]
    if not apart:
        return Finding("note", "all machines", f"they share the file system of {folder}")
    text = f"{folder} is on a disk of its own there: checkpoints and results lie on {first[0]}, and travel to it"
    return Finding("note", " and ".join(apart), text)


def check_equality(machines: Sequence[tuple[str, Facts]]) -> list[Finding]:
    """Findings between machines: what must be the same and is not."""
    found = []
    first_name, first = machines[0]
    for name, facts in machines[1:]:
        about = f"{first_name} and {name}"
        if _minor(first["python"]) != _minor(facts["python"]):
            found.append(_differs(about, "Python", first["python"], facts["python"]))
        packages = sorted({*first["packages"], *facts["packages"]})
        for package in packages:
            here, there = first["packages"].get(package), facts["packages"].get(package)
            if here != there:
                found.append(_differs(about, package, here or "is absent", there or "is absent"))
        if first["cuda"] != facts["cuda"]:
            found.append(_differs(about, "the CUDA of torch", first["cuda"] or "none", facts["cuda"] or "none"))
        same_version = first["packages"].get("fleetune") == facts["packages"].get("fleetune")
        if same_version and first["code"] != facts["code"]:
            found.append(_differs(about, "fleetune's own code", first["code"], facts["code"]))
        if first["driver"] != facts["driver"]:
            text = f"the NVIDIA driver is {first['driver'] or 'absent'} and {facts['driver'] or 'absent'}"
            found.append(Finding("warning", about, text, "Install the same driver where you can"))
    return found


def check_clock(name: str, skew_s: float) -> list[Finding]:
    if abs(skew_s) < _SKEW_S:
        return []
    fix = "Turn on time synchronisation (chrony, systemd-timesyncd)"
    return [
        Finding("warning", name, f"its clock differs by {skew_s:+.1f} s from this machine's: times in logs will not match", fix)
    ]


def check_pair(first: str, second: str, measured: Facts) -> list[Finding]:
    """Findings about the way from one machine to another."""
    about = f"{first} to {second}"
    if "error" in measured:
        return [
            Finding(
                "error", about, measured["error"], "Open all ports between the machines, or name another interface's address"
            )
        ]
    found = []
    if measured["bytes_per_s"] < _FAST_BYTES_PER_S:
        text = f"{speed(measured['bytes_per_s'])} is less than 1 Gbit/s: full fine-tuning will wait for the network"
        found.append(Finding("warning", about, text, "Train an adapter (--method lora), or use a faster interface"))
    if measured["rtt_s"] > _SLOW_RTT_S:
        found.append(
            Finding("warning", about, f"a round trip takes {1000 * measured['rtt_s']:.1f} ms", "Use machines of one room")
        )
    return found


def _system(name: str, facts: Facts) -> list[Finding]:
    if not facts["system"].startswith("Linux"):
        text = f"{facts['system']} is no Linux: one process trains here, and what needs several was never tried"
        return [Finding("warning", name, text, "Use Linux, Ubuntu 20.04 or later")]
    found = re.match(r"Ubuntu (\d+\.\d+)", facts["distribution"])
    if found and version_key(found[1]) < version_key(OLDEST["ubuntu"]):
        text = f"{facts['distribution']} is older than Ubuntu {OLDEST['ubuntu']}"
        return [Finding("warning", name, text, "Upgrade it, or use a container with a newer system")]
    return []


def _versions(name: str, facts: Facts) -> list[Finding]:
    found = []
    for package, oldest in SAFE_VERSIONS.items():
        version = facts["packages"].get(package)
        if version is not None and version_key(version) < version_key(oldest):
            text = f"{package} {version} is older than {oldest}, and a prepared model or data set can run code in it"
            found.append(Finding("warning", name, text, f"Install {package} {oldest} or later"))
    for package in ("torch", "transformers"):
        if package not in facts["packages"]:
            found.append(Finding("error", name, f"{package} is not installed", f"pip install {package}"))
    if version_key(facts["python"]) < version_key(OLDEST["python"]):
        found.append(
            Finding("error", name, f"Python {facts['python']} is older than {OLDEST['python']}", "Install a newer Python")
        )
    if facts["cuda"] is not None and version_key(facts["cuda"]) < version_key(OLDEST["cuda"]):
        found.append(
            Finding(
                "error", name, f"torch is built with CUDA {facts['cuda']}, older than {OLDEST['cuda']}", "Install a newer torch"
            )
        )
    return found


def _devices(name: str, facts: Facts) -> list[Finding]:
    found = []
    built_for_cpu = facts["cuda"] is None
    if facts["visible_gpus"] and built_for_cpu:
        text = f"{facts['visible_gpus']} GPUs are here, and the installed torch is built for CPUs"
        found.append(Finding("warning", name, text, "Install a torch with CUDA, or they stay idle"))
    if not facts["visible_gpus"]:
        found.append(Finding("note", name, f"no NVIDIA GPU: it trains on {facts['cores']} CPU cores"))
    for number, gpu in enumerate(facts["gpus"]):
        if gpu["memory_bytes"] < GPU_BYTES:
            text = f"GPU {number} ({gpu['name']}) has {gigabytes(gpu['memory_bytes'])}, less than the 16 GB that 7B models need"
            found.append(Finding("warning", name, text, "Choose a smaller model"))
        if gpu["used_bytes"] > 0.1 * gpu["memory_bytes"]:
            text = f"GPU {number} is in use: {gigabytes(gpu['used_bytes'])} of its memory are taken"
            found.append(Finding("warning", name, text, "End what runs there (nvidia-smi names it)"))
    return found


def _differs(about: str, what: str, here: str, there: str) -> Finding:
    fix = "Install the same environment on both (pip install -c constraints.txt), from the same checkout"
    return Finding("error", about, f"{what} is {here} on the one and {there} on the other", fix)


def _minor(version: str) -> tuple[int, ...]:
    return version_key(version)[:2]


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what stands behind a plus: `2.13.0+cpu` -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def speed(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e9:.2f} Gbit/s"
