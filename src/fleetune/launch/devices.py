"""What this machine has to compute with, found without torch: a login node without torch can ask too."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fleetune.spec.errors import UserError

Device = Literal["cpu", "cuda"]

#: Two processes with two threads each on 2 cores were 8 times slower than with one each (torch 2.13, gloo).
_OVERSUBSCRIBED = "too many threads for the cores make a run several times slower"

#: Libraries that start their own threads, and the variable each reads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def count_devices(device: str) -> tuple[Device, int]:
    """(kind, count) of the devices that `auto`, `cpu` or `cuda` means here: GPUs, or the cores this process may use.

    `auto` is `cuda` where there is a GPU and a torch that can use it. Raises UserError for `cuda` without one.
    """
    if device == "cpu":
        return "cpu", usable_cores()
    gpus = count_gpus()
    usable = gpus > 0 and not _torch_is_cpu_only()
    if usable:
        return "cuda", gpus
    if device == "cuda":
        raise UserError(_no_gpu(gpus))
    return "cpu", usable_cores()


def choose_processes(device: str, asked: int | None, at_least: int | None = None) -> tuple[Device, int]:
    """(kind, number of processes): `asked` (--gpus), or one a GPU, or one CPU process. Raises UserError for too many GPUs.

    at_least: where `asked` GPUs are not there, so few will do.

    More CPU processes than cores are possible, for trying things out; `thread_variables` warns.
    """
    kind, count = count_devices(device)
    if kind == "cuda" and asked is not None and at_least is not None and at_least <= count < asked:
        return kind, count
    if kind == "cuda" and asked is not None and asked > count:
        raise UserError(
            f"--gpus {asked} and this machine has {count} usable GPUs{_visible_note()}: give --gpus {count} or fewer, "
            "or --device cpu"
        )
    if at_least is not None and kind == "cuda" and count < at_least:
        raise UserError(f"min_gpus {at_least} and this machine has {count} usable GPUs{_visible_note()}: give a smaller number")
    if asked is not None:
        return kind, asked
    return kind, count if kind == "cuda" else 1


def count_gpus() -> int:
    """NVIDIA GPUs that a process of this environment sees (CUDA_VISIBLE_DEVICES is respected)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    found = _count_by_nvml()
    if found is None:
        found = _count_by_driver(Path("/proc/driver/nvidia/gpus"))
    if found is None:
        found = _count_by_tool()
    return visible_count(found or 0, visible)


def visible_count(found: int, visible: str | None) -> int:
    """How many of `found` GPUs the text of CUDA_VISIBLE_DEVICES leaves. CUDA reads it up to the first entry that is no GPU."""
    if visible is None:
        return found
    count = 0
    seen: set[str] = set()
    for entry in (part.strip() for part in visible.split(",")):
        is_index = entry.isdigit() and int(entry) < found
        if entry in seen or not (is_index or entry.startswith(("GPU-", "MIG-"))):
            break
        seen.add(entry)
        count += 1
    return count if found else 0


def usable_cores() -> int:
    """Cores this process may use: by affinity, and by the quota of its control group (a container's limit)."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _quota(Path("/sys/fs/cgroup"))
    return max(1, min(cores, int(quota)) if quota else cores)


def thread_variables(
    num_processes: int, threads: int | None, environment: Mapping[str, str], cores: int
) -> tuple[dict[str, str], str | None]:
    """Environment of one process: its number of threads, and a warning where all of them together are more than the cores.

    threads: what the person gave; else OMP_NUM_THREADS of `environment`; else the cores, shared out.
    """
    given = environment.get("OMP_NUM_THREADS", "")
    source = "--threads"
    if threads is None and given.isdigit() and int(given) > 0:
        threads, source = int(given), "OMP_NUM_THREADS"
    if threads is None:
        threads, source = max(1, cores // num_processes), "one each"
    warning = None
    if threads * num_processes > cores:
        fewer = f"--threads {max(1, cores // num_processes)}" if threads > 1 else f"--gpus {cores}"
        warning = (
            f"{num_processes} processes with {threads} threads each ({source}) on {cores} cores: {_OVERSUBSCRIBED}; "
            f"give {fewer}"
        )
    return dict.fromkeys(THREAD_VARIABLES, str(threads)), warning


def _count_by_nvml() -> int | None:
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _count_by_driver(folder: Path) -> int | None:
    """The driver lists each GPU as a folder."""
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return None


def _count_by_tool() -> int | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else None


def _torch_is_cpu_only() -> bool:
    """Wheels for CPUs say so in their version (`2.13.0+cpu`). torch itself is not imported for it."""
    return _torch_version().endswith("+cpu")


def _torch_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _no_gpu(gpus: int) -> str:
    if gpus:
        return (
            f"--device cuda and {gpus} GPUs are here, but the installed torch {_torch_version()} is built for CPUs: "
            "install a torch with CUDA, or give --device cpu"
        )
    return f"--device cuda and no NVIDIA GPU is found here{_visible_note()}: see whether nvidia-smi works, or give --device cpu"


def _visible_note() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"


def _quota(root: Path) -> float | None:
    """Cores by the control group's quota, version 2 or 1; None where there is none."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)
