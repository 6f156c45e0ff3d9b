"""A disk that is full, broken, read-only or gone: training goes on, every rank hears why, older checkpoints stand."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint.disks import Operation, WatchedDisk
from checkpoint.layouts import Tensors, rows_of, same_tensors, save_on_ranks, training_state, whole
from fleetune.checkpoint.space import bytes_needed, bytes_text, space_warning
from fleetune.checkpoint.store import CheckpointStore
from fleetune.spec.records import Shard

REMOVALS = ("remove_file", "remove_folder")


class Breaking:
    """Fails operation number `at` with `code`, and all that follow where it `lasts` (removals too, where they must)."""

    def __init__(self, at: int, code: int, *, lasts: bool, removals: bool) -> None:
        self.at, self.code, self.lasts, self.removals = at, code, lasts, removals
        self.count = 0

    def __call__(self, operation: Operation) -> None:
        self.count += 1
        if operation.kind in REMOVALS and not self.removals:
            return
        if self.count == self.at or (self.lasts and self.count > self.at):
            raise OSError(self.code, os.strerror(self.code), str(operation.path))


def small(seed: int) -> Tensors:
    return {key: tensor for key, tensor in training_state(seed).items() if key[0] in ("experts", "bias")}


def count_operations(folder: Path, world_size: int) -> int:
    """Operations (reading back among them) of an undisturbed save."""
    counter = Breaking(0, 0, lasts=False, removals=False)
    disk = WatchedDisk(counter)
    reports = save_on_ranks(folder, lambda rank: rows_of(small(2), rank, world_size), world_size=world_size, step=2, disk=disk)
    assert reports[0].error is None
    return counter.count


@pytest.mark.parametrize(
    ("code", "lasts", "removals"),
    [(errno.EIO, False, True), (errno.ENOSPC, True, False), (errno.EROFS, True, True)],
    ids=["one error", "full", "read-only"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_whichever_operation_fails_no_rank_hangs_and_the_old_checkpoint_stands(
    tmp_path: Path, code: int, lasts: bool, removals: bool, world_size: int
) -> None:
    num_operations = count_operations(tmp_path / "clean", world_size)
    assert num_operations > 15
    tensors = {step: small(step) for step in (1, 2, 3)}
    for at in range(1, num_operations + 1):
        folder = tmp_path / str(at)
        CheckpointStore(folder).save(1, whole(tensors[1]), {"step": 1})
        drained = []

        def shards(rank: int, drained: list[int] = drained) -> Iterator[Shard]:
            yield from rows_of(tensors[2], rank, world_size)
            drained.append(rank)

        disk = WatchedDisk(Breaking(at, code, lasts=lasts, removals=removals))
        reports = save_on_ranks(folder, shards, world_size=world_size, step=2, disk=disk)
        assert sorted(drained) == list(range(world_size)), "a rank stopped making shards: the others wait in a collective"
        errors = [report.error for report in reports]
        assert all(errors) or not any(errors), errors
        latest = CheckpointStore(folder).latest()
        assert latest is not None
        assert latest.step == (1 if errors[0] else 2)
        assert same_tensors(latest, tensors[latest.step])
        if errors[0]:
            assert os.strerror(code) in errors[0] or "neither its part nor a cause" in errors[0]
        report = CheckpointStore(folder).save(3, whole(tensors[3]), {"step": 3})  # the disk works again
        assert report.error is None
        assert {path.name for path in folder.iterdir()} <= {"step-000001", "step-000002", "step-000003"}


def test_the_other_ranks_hear_the_cause_of_a_rank_that_failed_from_rank_0(tmp_path: Path) -> None:
    def before(operation: Operation) -> None:
        if operation.path.name == "rank-00001-0000.safetensors" and operation.kind == "sync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    reports = save_on_ranks(
        tmp_path, lambda rank: rows_of(training_state(), rank, 3), world_size=3, step=1, disk=WatchedDisk(before)
    )
    assert reports[0].error == reports[1].error == "rank 1 could not write rank-00001-0000.safetensors: Input/output error"
    assert "rank 0 gave the save up" in str(reports[2].error)


def test_a_disk_that_gives_back_other_bytes_is_found_before_the_old_checkpoint_goes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    assert store.save(1, whole(training_state(1)), {}).error is None

    class Lying(WatchedDisk):
        def open(self, path: Path):  # type: ignore[no-untyped-def]
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            return super().open(path)

    report = CheckpointStore(tmp_path, keep=1, disk=Lying()).save(2, whole(training_state(2)), {})
    assert "reading it back gave other bytes than were written" in str(report.error)
    assert CheckpointStore(tmp_path).all_steps() == [1]


def big(num_bytes: int, seed: int = 0) -> Iterator[Shard]:
    each = 64 << 10
    generator = torch.Generator().manual_seed(seed)
    for number in range(num_bytes // each):
        tensor = torch.randn(each // 4, generator=generator)
        yield Shard(f"weight.{number}", "parameter", (each // 4,), (0,), tensor)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_told_with_what_is_missing_and_its_space_is_given_back(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    store = CheckpointStore(folder, file_bytes=256 << 10)
    assert store.save(1, big(1 << 20, seed=1), {"step": 1}).error is None
    free = store._disk.free_bytes(folder)
    for step, num_bytes in enumerate((5 << 20, (3 << 20) + 4096, 8 << 20), start=2):
        report = store.save(step, big(num_bytes, seed=step), {"step": step})
        error = str(report.error)
        assert "the disk is full" in error and str(folder) in error
        assert f"the checkpoint needs {bytes_text(num_bytes // 65536 * 65536)}" in error, error
        missing = num_bytes // 65536 * 65536 - free
        assert missing <= 0 or f"{bytes_text(missing)} are missing" in error, error
        assert store._disk.free_bytes(folder) == free, "the space of the failed save was not given back"
        assert CheckpointStore(folder).all_steps() == [1]
    assert store.save(9, big(2 << 20, seed=9), {"step": 9}).error is None
    assert CheckpointStore(folder).all_steps() == [1, 9]


def test_two_ranks_on_a_full_disk_both_hear_of_it(small_disk: Path) -> None:
    def shards(rank: int) -> Iterator[Shard]:
        for shard in big((3 << 20) if rank else (1 << 19), seed=rank):
            yield Shard(f"{rank}.{shard.name}", shard.role, shard.global_shape, shard.offset, shard.tensor)

    folder = small_disk / "checkpoints"
    assert save_on_ranks(folder, lambda rank: rows_of(training_state(1), rank, 2), world_size=2, step=1)[0].error is None
    (small_disk / "ballast").write_bytes(bytes(2 << 20))
    reports = save_on_ranks(folder, shards, world_size=2, step=2, file_bytes=128 << 10)
    assert all(report.error for report in reports)
    assert "the checkpoint needs 3.7 MB" in str(reports[0].error), reports[0].error
    assert CheckpointStore(folder).all_steps() == [1]


@pytest.mark.parametrize("limit", [1, 100, 70_000, 600_000])
def test_the_largest_file_size_is_a_limit_that_is_told(tmp_path: Path, limit: int) -> None:
    store = CheckpointStore(tmp_path)
    assert store.save(1, whole(training_state(1)), {"step": 1}).error is None
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        report = store.save(2, big(1 << 20), {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "the largest allowed file size is reached (see ulimit -f)" in str(report.error)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert store.all_steps() == [1]
    assert store.save(2, big(1 << 20), {"step": 2}).error is None


def test_a_place_that_is_no_folder_is_an_error_of_the_save_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reports = save_on_ranks(
        tmp_path / "file" / "checkpoints", lambda rank: rows_of(training_state(), rank, 2), world_size=2, step=1
    )
    assert "rank 0 could not begin" in str(reports[0].error)
    assert "rank 1 sees no folder of rank 0's" in str(reports[1].error)


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.save(1, whole(training_state(1)), {})
    os.rename(tmp_path / "run", tmp_path / "moved")
    assert store.save(2, whole(training_state(2)), {}).error is None
    assert store.all_steps() == [2]


def test_a_run_that_will_not_fit_is_told_before_it_starts(tmp_path: Path) -> None:
    assert bytes_needed(checkpoint_bytes=10, keep=2, keeps_best=True) == 40
    assert space_warning(tmp_path / "not" / "there", checkpoint_bytes=1000, keep=2, keeps_best=True) is None
    warning = space_warning(tmp_path / "not" / "there", checkpoint_bytes=10**15, keep=2, keeps_best=False)
    assert warning is not None
    assert "3000.0 TB" in warning and "--keep-checkpoints 2" in warning and "--run" in warning
