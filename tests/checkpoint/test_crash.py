"""A power cut at every operation of a save, with every order in which unsynced things may have reached the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.disks import DiskModel, Operation, WatchedDisk, materialise
from checkpoint.layouts import Tensors, rows_of, same_tensors, save_on_ranks, training_state, whole
from fleetune.checkpoint.store import CheckpointStore

SMALL = {key: tensor for key, tensor in training_state().items() if key[0] in ("bias", "step")}


def small(seed: int) -> Tensors:
    return {key: tensor for key, tensor in training_state(seed).items() if key in SMALL}


def crash_everywhere(
    folder: Path, save: Callable[[WatchedDisk], None], check: Callable[[CheckpointStore, bool], None], scratch: Path
) -> int:
    """Save through a recording disk, then rebuild what a crash after each operation may leave, and check it.

    check(store of the rebuilt folder, whether the save had ended) asserts. Returns the number of states that were checked.
    """
    model = DiskModel(folder)
    disk = WatchedDisk()
    save(disk)
    num_states = 0
    for done in range(len(disk.operations) + 1):
        if done:
            model.apply(disk.operations[done - 1])
        for tree in model.crash_states():
            num_states += 1
            place = scratch / str(num_states)
            materialise(tree, place)
            check(CheckpointStore(place), done == len(disk.operations))
            shutil.rmtree(place)
    kinds = {operation.kind for operation in disk.operations}
    assert {"create", "write", "sync", "rename", "sync_folder"} <= kinds
    return num_states


def found(store: CheckpointStore) -> tuple[int, int] | None:
    """(step, seed of the tensors that were saved) of the latest checkpoint, which must be whole."""
    latest = store.latest()
    if latest is None:
        return None
    seed = int(latest.state["seed"])
    assert same_tensors(latest, small(seed))
    return latest.step, seed


def test_a_first_save_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def save(disk: WatchedDisk) -> None:
        assert CheckpointStore(folder, disk=disk).save(1, whole(small(1)), {"seed": 1}).error is None

    def check(store: CheckpointStore, ended: bool) -> None:
        assert found(store) == (1, 1) if ended else found(store) in (None, (1, 1))
        assert store.refused == []

    assert crash_everywhere(folder, save, check, tmp_path) > 50


def test_with_the_old_one_deleted_after_the_new_one_is_saved_one_of_the_two_is_always_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    CheckpointStore(folder).save(1, whole(small(1)), {"seed": 1})

    def save(disk: WatchedDisk) -> None:
        store = CheckpointStore(folder, disk=disk, keep=1)
        assert store.save(2, whole(small(2)), {"seed": 2}).error is None
        assert any(operation.kind == "remove_folder" for operation in disk.operations), "the old one was not deleted"

    def check(store: CheckpointStore, ended: bool) -> None:
        assert found(store) == (2, 2) if ended else found(store) in ((1, 1), (2, 2))

    assert crash_everywhere(folder, save, check, tmp_path) > 60


def test_a_checkpoint_that_replaces_one_of_its_own_step_is_the_old_or_the_new(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    CheckpointStore(folder).save(2, whole(small(1)), {"seed": 1})

    def save(disk: WatchedDisk) -> None:
        assert CheckpointStore(folder, disk=disk).save(2, whole(small(2)), {"seed": 2}).error is None

    def check(store: CheckpointStore, ended: bool) -> None:
        assert found(store) == (2, 2) if ended else found(store) in ((2, 1), (2, 2))
        if not ended and len(list(store.folder.iterdir())) > 1:  # the next save goes on from whatever was left
            assert store.save(3, whole(small(3)), {"seed": 3}).error is None
            assert found(store) == (3, 3)
            assert {path.name for path in store.folder.iterdir()} <= {"step-000002", "step-000003"}

    assert crash_everywhere(folder, save, check, tmp_path) > 60


def test_two_ranks_writing_at_once_leave_the_old_or_the_new(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    CheckpointStore(folder).save(1, whole(small(1)), {"seed": 1})

    def save(disk: WatchedDisk) -> None:
        reports = save_on_ranks(
            folder, lambda rank: rows_of(small(2), rank, 2), world_size=2, step=2, state={"seed": 2}, disk=disk, keep=1
        )
        assert [report.error for report in reports] == [None, None]

    def check(store: CheckpointStore, ended: bool) -> None:
        assert found(store) == (2, 2) if ended else found(store) in ((1, 1), (2, 2))

    assert crash_everywhere(folder, save, check, tmp_path) > 60


@pytest.mark.parametrize("skipped", ["sync", "sync_folder"])
def test_the_enumeration_notices_a_save_that_does_not_sync(tmp_path: Path, skipped: str) -> None:
    """The test above can fail: without the syncs of files or folders some crash leaves nothing that can be used."""
    folder = tmp_path / "run"
    CheckpointStore(folder).save(1, whole(small(1)), {"seed": 1})

    class Careless(WatchedDisk):
        def do(self, operation: Operation, action: Callable[[], object]) -> object:
            return action() if operation.kind == skipped else super().do(operation, action)

    model = DiskModel(folder)
    disk = Careless()
    assert CheckpointStore(folder, disk=disk, keep=1).save(2, whole(small(2)), {"seed": 2}).error is None
    results = set()
    for number, operation in enumerate(disk.operations):
        model.apply(operation)
        for other, tree in enumerate(model.crash_states()):
            place = tmp_path / f"{number}-{other}"
            materialise(tree, place)
            results.add(found(CheckpointStore(place)))
            shutil.rmtree(place)
            if None in results:
                return
    raise AssertionError(f"only {results} were found")
