"""Saving in the background: only the copy is waited for, what is written is what was there then, and every fault is told."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from checkpoint.disks import Operation, WatchedDisk
from fleetune.checkpoint.background import Saver
from fleetune.checkpoint.store import CheckpointStore
from fleetune.spec.records import Shard

PATIENCE_S = 60


class SlowDisk(WatchedDisk):
    """Nothing is written before `go` is set."""

    def __init__(self) -> None:
        self.go, self.has_begun = threading.Event(), threading.Event()
        super().__init__(self._wait)

    def _wait(self, operation: Operation) -> None:
        self.has_begun.set()
        assert self.go.wait(PATIENCE_S)


def shards_of(tensor: torch.Tensor) -> list[Shard]:
    return [Shard("weight", "parameter", tuple(tensor.shape), (0,) * tensor.ndim, tensor)]


def read_back(store: CheckpointStore, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    checkpoint = store.at(step)
    assert checkpoint is not None
    return checkpoint.read("weight", "parameter", (0,) * len(shape), shape)


def test_the_checkpoint_has_the_bits_of_the_moment_it_was_asked_for_however_slow_the_disk(tmp_path: Path):
    disk = SlowDisk()
    saver = Saver(CheckpointStore(tmp_path / "store", disk=disk), in_background=True)
    weight = torch.arange(12.0).view(3, 4)
    then = weight.clone()
    assert saver.begin(1, shards_of(weight), {"step": 1}) is None
    weight.fill_(-1)  # training goes on
    assert disk.has_begun.wait(PATIENCE_S) and saver.busy and saver.in_flight
    with pytest.raises(RuntimeError, match="still on its way"):
        saver.begin(2, shards_of(weight), {"step": 2})
    disk.go.set()
    report = saver.take()
    assert report is not None and report.error is None and report.step == 1
    assert not saver.in_flight and saver.take() is None
    store = CheckpointStore(tmp_path / "store")
    assert torch.equal(read_back(store, 1, (3, 4)), then)


def test_the_copies_are_used_again_and_never_mixed_up(tmp_path: Path):
    store = CheckpointStore(tmp_path / "store", keep=9)
    saver = Saver(store, in_background=True)
    for step in range(1, 5):
        saver.begin(step, shards_of(torch.full((2, step), float(step))), {"step": step})
        saver.take()
    for step in range(1, 5):
        assert torch.equal(read_back(store, step, (2, step)), torch.full((2, step), float(step)))


def test_what_the_disk_does_wrong_is_in_the_report_and_what_else_is_raised_comes_out_of_take(tmp_path: Path):
    def full(operation: Operation) -> None:
        if operation.kind == "write":
            raise OSError(28, "No space left on device")

    weight = torch.ones(4)
    saver = Saver(CheckpointStore(tmp_path / "full", disk=WatchedDisk(full)), in_background=True)
    saver.begin(1, shards_of(weight), {})
    report = saver.take()
    assert report is not None and "the disk is full" in str(report.error)

    def peer_died() -> None:
        raise RuntimeError("connection closed by peer")

    saver = Saver(CheckpointStore(tmp_path / "peer", barrier=peer_died), in_background=True)
    saver.begin(1, shards_of(weight), {})
    with pytest.raises(RuntimeError, match="closed by peer"):
        saver.take()
    assert not saver.in_flight


def test_who_writes_first_brings_the_rows_to_the_disk(tmp_path: Path):
    seen: list[str] = []
    for in_background in (True, False):
        saver = Saver(CheckpointStore(tmp_path / str(in_background)), in_background=in_background)
        saver.first = lambda: seen.append(threading.current_thread().name)
        report = saver.begin(1, shards_of(torch.ones(2)), {})
        assert (report is None) is in_background
        report = report or saver.take()
        assert report is not None and (tmp_path / str(in_background) / "step-000001").is_dir()
        assert in_background or report.stall_s >= report.seconds
    assert seen == ["save", threading.main_thread().name]
