from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.launch import devices
from fleetune.launch.devices import choose_processes, count_devices, count_gpus, thread_variables, usable_cores, visible_count
from fleetune.spec.errors import UserError


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        ("0,1,2,3", 4),
        ("0,7,1", 1),  # CUDA stops at the first entry that is no GPU
        ("0,0", 1),
        ("GPU-8932f937-d72c", 1),
        ("MIG-a,MIG-b", 2),
        ("none", 0),
    ],
)
def test_visible_devices_are_counted_as_cuda_does(visible: str | None, count: int) -> None:
    assert visible_count(4, visible) == count


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose nvidia-smi lists two GPUs (a real program on the PATH)."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-aa)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-bb)'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if count_gpus() != 2:
        pytest.skip("this machine has its own GPUs")


def test_gpus_are_counted_by_nvidia_smi_where_there_is_no_nvml(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert count_gpus() == 1


def test_a_torch_for_cpus_uses_no_gpu_and_says_why(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_torch_version", lambda: "2.13.0+cpu")
    assert count_devices("auto") == ("cpu", usable_cores())
    with pytest.raises(UserError, match=r"2\.13\.0\+cpu is built for CPUs"):
        count_devices("cuda")


def test_one_process_a_gpu_and_never_more(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_torch_version", lambda: "2.13.0")
    assert count_devices("auto") == ("cuda", 2)
    assert choose_processes("auto", None) == ("cuda", 2)
    assert choose_processes("auto", 1) == ("cuda", 1)
    assert choose_processes("cpu", 3) == ("cpu", 3)
    with pytest.raises(UserError, match="--gpus 3 and this machine has 2 usable GPUs"):
        choose_processes("cuda", 3)


@pytest.mark.claim(
    "H7",
    command="fleetune train --device cuda",
    seen="without a GPU a CPU process trains, and cuda is refused with the reason",
)
def test_without_a_gpu_cuda_is_an_error_and_auto_is_one_cpu_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_processes("auto", None) == ("cpu", 1)
    assert choose_processes("auto", 2) == ("cpu", 2)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES is ''"):
        count_devices("cuda")


def test_cores_are_those_of_the_affinity() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from fleetune.launch.devices import usable_cores; print(usable_cores())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


def test_cores_are_limited_by_a_containers_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert devices._quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert devices._quota(tmp_path) is None
    first = tmp_path / "v1" / "cpu"
    first.mkdir(parents=True)
    (first / "cpu.cfs_quota_us").write_text("400000\n")
    (first / "cpu.cfs_period_us").write_text("100000\n")
    assert devices._quota(tmp_path / "v1") == 4.0


def test_cores_are_shared_out_and_never_oversubscribed_silently() -> None:
    assert thread_variables(1, None, {}, 8) == (dict.fromkeys(devices.THREAD_VARIABLES, "8"), None)
    assert thread_variables(3, None, {}, 8)[0]["OMP_NUM_THREADS"] == "2"
    variables, warning = thread_variables(2, 4, {}, 2)
    assert variables["OMP_NUM_THREADS"] == "4"
    assert warning is not None and "2 processes with 4 threads each" in warning and "--threads 1" in warning
    variables, warning = thread_variables(4, None, {}, 2)
    assert variables["OMP_NUM_THREADS"] == "1" and warning is not None and "--gpus 2" in warning


def test_what_the_person_gives_comes_before_the_environment_and_that_before_the_default() -> None:
    assert thread_variables(1, 3, {"OMP_NUM_THREADS": "2"}, 8)[0]["OMP_NUM_THREADS"] == "3"
    assert thread_variables(1, None, {"OMP_NUM_THREADS": "2"}, 8)[0]["OMP_NUM_THREADS"] == "2"
    assert thread_variables(1, None, {"OMP_NUM_THREADS": "many"}, 8)[0]["OMP_NUM_THREADS"] == "8"
