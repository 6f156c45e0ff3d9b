from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import pytest

from fleetune.monitor import memory
from fleetune.monitor.memory import PeakMemory, current_memory, return_free_memory

MB = 1 << 20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_what_a_process_allocates_is_counted() -> None:
    before = current_memory()
    block = bytearray(b"x") * (200 * MB)
    assert 190 * MB < current_memory() - before < 230 * MB
    del block


@linux
def test_pages_that_lie_free_within_the_heap_are_given_back() -> None:
    blocks = [bytearray(b"x") * 100_000 for _ in range(2000)]  # too small for mappings of their own
    pins = blocks[::10]
    del blocks
    before = current_memory()
    return_free_memory()
    assert before - current_memory() > 100 * MB
    assert all(pin[-1] == ord("x") for pin in pins)


@linux
def test_memory_shared_between_processes_is_counted() -> None:
    before = current_memory()
    with mmap.mmap(-1, 100 * MB) as shared:
        shared.write(b"x" * (100 * MB))
        assert 90 * MB < current_memory() - before < 230 * MB
    assert current_memory() - before < 60 * MB


@linux
def test_a_mapped_file_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (200 * MB))
    before = current_memory()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[start] for start in range(0, len(mapped), 4096)) > 0
        status = Path("/proc/self/status").read_text()
        resident = int(status.split("RssFile:")[1].split()[0]) * 1024
        assert resident > 200 * MB, "the file is resident, so that RSS would have counted it"
        assert current_memory() - before < 20 * MB


def test_a_peak_between_two_looks_is_seen() -> None:
    peak = PeakMemory(interval_s=0.01)
    try:
        before = peak()
        block = bytearray(b"x") * (150 * MB)
        time.sleep(0.3)
        del block
        assert peak() - before > 140 * MB
        assert peak() == peak()
    finally:
        peak.close()
    assert peak._thread is not None and not peak._thread.is_alive()


def test_a_device_s_own_peak_is_the_answer_where_it_has_one() -> None:
    peak = PeakMemory(lambda: 123)
    assert peak() == 123
    peak.close()


def test_without_proc_the_unique_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*arguments: object, **options: object) -> None:
        raise FileNotFoundError

    plausible = current_memory()
    monkeypatch.setattr(memory, "open", absent, raising=False)
    assert 0.5 * plausible < memory._unique_memory() < 2 * plausible + 500 * MB
    assert abs(current_memory() - memory._unique_memory()) < 50 * MB


@linux
def test_a_look_costs_microseconds() -> None:
    costs = []
    for _ in range(200):
        began = time.perf_counter()
        current_memory()
        costs.append(time.perf_counter() - began)
    assert sorted(costs)[100] < memory.INTERVAL_S / 100
