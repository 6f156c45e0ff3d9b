"""What a machine is: versions, devices, memory, disks, network. Found in a moment, without importing torch."""

from __future__ import annotations

import getpass
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from fleetune.launch.devices import count_gpus, usable_cores

#: Packages whose versions must be the same on all nodes: they decide over numbers, file formats or the wire.
PACKAGES = (
    "fleetune",
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "safetensors",
    "jinja2",
    "numpy",
    "pyarrow",
    "bitsandbytes",
    "deepspeed",
)

_SYSFS = Path("/sys")


def machine_facts() -> dict[str, Any]:
    """Everything of this machine, as plain JSON values. Sizes in bytes."""
    return {
        "host": socket.gethostname(),
        "user": _user(),
        "system": f"{platform.system()} {platform.release()}",
        "distribution": _distribution(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "code": code_hash(),
        "cuda": _cuda_of_torch(),
        "driver": _driver(),
        "gpus": gpus(),
        "visible_gpus": count_gpus(),
        "cores": usable_cores(),
        **memory_facts(),
        "interfaces": interfaces(),
        "infiniband": infiniband(_SYSFS),
        "time": time.time(),
    }


def code_hash() -> str:
    """SHA-256 over names and contents of fleetune's own files: two checkouts of one version may differ."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def memory_facts() -> dict[str, Any]:
    """Memory of the machine or its container, and of /dev/shm, in bytes."""
    import psutil

    memory = psutil.virtual_memory()
    limit = _cgroup_bytes()
    facts: dict[str, Any] = {
        "memory_bytes": min(memory.total, limit) if limit else memory.total,
        "available_bytes": min(memory.available, limit) if limit else memory.available,
    }
    with suppress(OSError):
        shm = shutil.disk_usage("/dev/shm")
        facts |= {"shm_bytes": shm.total, "shm_free_bytes": shm.free}
    return facts


def disk_facts(folder: Path) -> dict[str, Any]:
    """The disk on which a folder lies or would lie: free bytes, its type, and whether it may be written to."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(place)
    return {
        "folder": str(folder),
        "free_bytes": usage.free,
        "bytes": usage.total,
        "type": file_system(place),
        "writable": os.access(place, os.W_OK),
    }


def file_system(place: Path) -> str:
    """The type of the file system that a folder lies on, as the kernel names it; `?` where it does not tell."""
    best, kind = "", "?"
    with suppress(OSError):
        real = str(place.resolve())
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mount, name, *_ = line.split()
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, name
    return kind


def gpus() -> list[dict[str, Any]]:
    """Name, memory, load and temperature of each NVIDIA GPU, through the driver's own library; empty without it."""
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped]

        pynvml.nvmlInit()
    except Exception:  # no such package, no driver, no device: each is "no GPU to speak of"
        return []
    found = []
    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            row = {"name": _text(pynvml.nvmlDeviceGetName(handle)), "memory_bytes": memory.total, "used_bytes": memory.used}
            with suppress(pynvml.NVMLError):
                row["load_percent"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            with suppress(pynvml.NVMLError):
                row["celsius"] = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            with suppress(pynvml.NVMLError):
                row["watts"] = round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
            found.append(row)
    except pynvml.NVMLError:
        return found
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return found


def interfaces() -> list[dict[str, Any]]:
    """Interfaces that are up, with their addresses and the speed that the driver states (Mbit/s; 0: unknown)."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        addresses = [entry.address.partition("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if state is not None and state.isup and addresses:
            found.append({"name": name, "addresses": addresses, "speed_mbit": state.speed, "mtu": state.mtu})
    return found


def infiniband(sysfs: Path) -> list[dict[str, Any]]:
    """Ports of InfiniBand and RoCE cards, with their link layer and whether they are active."""
    found = []
    for port in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        row = {"device": port.parts[-3], "port": port.name}
        for key, name in (("link_layer", "link_layer"), ("state", "state"), ("rate", "rate")):
            with suppress(OSError):
                row[key] = (port / name).read_text().strip()
        row["kind"] = "RoCE" if row.get("link_layer") == "Ethernet" else "InfiniBand"
        found.append({**row, "active": "ACTIVE" in row.get("state", "")})
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _distribution() -> str:
    with suppress(OSError):
        text = Path("/etc/os-release").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.MULTILINE):
            return found[1]
    return platform.platform()


def _version(name: str) -> str | None:
    if name == "fleetune":
        from fleetune import __version__

        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    """The CUDA that the installed torch was built with, read from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        with suppress(OSError):
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
            if found := re.search(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", text, re.MULTILINE):
                return found[1]
    return None


def _driver() -> str | None:
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if found := re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text):
            return found[1]
    try:
        import pynvml

        pynvml.nvmlInit()
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # see `gpus`
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cgroup_bytes() -> int | None:
    """The memory limit of this process's control group; None where there is none."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int(Path(name).read_text())
            return limit if limit < 1 << 60 else None
    return None
