from __future__ import annotations

import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.layouts import layout, rows_of, same_tensors, save_on_ranks, training_state, whole
from fleetune.checkpoint.store import CheckpointStore
from fleetune.spec.records import Shard


def test_what_was_saved_comes_back_bit_for_bit_with_its_state(tmp_path: Path) -> None:
    tensors = training_state(3)
    state = {"step": 100, "best_loss": 0.1 + 0.2, "before": {"loss": 2.5}, "text": "ü"}
    report = CheckpointStore(tmp_path, fingerprints={"data": "abc"}).save(100, whole(tensors), state)
    assert report.error is None and report.step == 100 and report.seconds > 0
    checkpoint = CheckpointStore(tmp_path).latest()
    assert checkpoint is not None
    assert same_tensors(checkpoint, tensors)
    assert checkpoint.state == state and checkpoint.fingerprints == {"data": "abc"}
    files = [file for file in checkpoint.folder.iterdir() if file.suffix == ".safetensors"]
    assert report.bytes == checkpoint.num_bytes == sum(file.stat().st_size for file in files)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(world_size=st.integers(1, 4), seed=st.integers(0, 10_000), data=st.data())
def test_any_layout_is_read_in_any_other(
    tmp_path_factory: pytest.TempPathFactory, world_size: int, seed: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("layouts")
    tensors = training_state(seed)
    ranks = layout(tensors, world_size, seed)
    reports = save_on_ranks(folder, lambda rank: ranks[rank], world_size=world_size, step=7, file_bytes=200)
    assert [report.error for report in reports] == [None] * world_size
    checkpoint = CheckpointStore(folder).latest()
    assert checkpoint is not None and checkpoint.world_size == world_size
    assert same_tensors(checkpoint, tensors)
    for (name, role), tensor in tensors.items():
        offset = tuple(data.draw(st.integers(0, size)) for size in tensor.shape)
        shape = tuple(data.draw(st.integers(0, size - start)) for start, size in zip(offset, tensor.shape))
        expected = tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
        assert torch.equal(checkpoint.read(name, role, offset, shape), expected)


def test_reading_gives_new_memory_that_outlives_the_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    tensors = training_state()
    store.save(1, whole(tensors), {})
    checkpoint = store.latest()
    assert checkpoint is not None
    first = checkpoint.read("bias", "parameter", (0,), (9,))
    first.zero_()
    assert torch.equal(checkpoint.read("bias", "parameter", (0,), (9,)), tensors["bias", "parameter"])
    assert store.at(1) is not None, "writing into a tensor that was read must not change the checkpoint"


def test_asking_for_what_is_not_there_says_what_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, whole(training_state()), {})
    checkpoint = store.latest()
    assert checkpoint is not None
    with pytest.raises(KeyError, match=r"did you mean layers.0.weight"):
        checkpoint.read("layers.0.weihgt", "parameter", (0, 0), (7, 5))
    with pytest.raises(KeyError, match="roles exp_avg, exp_avg_sq, parameter, and not momentum"):
        checkpoint.read("layers.0.weight", "momentum", (0, 0), (7, 5))
    for offset, shape in [((0, 0), (8, 5)), ((-1, 0), (2, 5)), ((0,), (7,)), ((6, 0), (2, 5))]:
        with pytest.raises(ValueError, match="not inside"):
            checkpoint.read("layers.0.weight", "parameter", offset, shape)


def test_only_safetensors_and_json_for_the_owner_alone_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save_on_ranks(folder, lambda rank: rows_of(training_state(), rank, 3), world_size=3, step=1)
    names = {path.name for path in (folder / "step-000001").iterdir()}
    assert names == {"manifest.json", *(f"rank-{rank:05d}-0000.safetensors" for rank in range(3))}
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_memory_stays_bounded_while_a_large_model_is_saved(tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def shards() -> Iterator[Shard]:
        nonlocal most
        for number in range(60):
            tensor = torch.full((1000,), float(number))
            alive.add(tensor)
            most = max(most, len(alive))
            yield Shard(f"weight.{number}", "parameter", (1000,), (0,), tensor)
            del tensor

    report = CheckpointStore(tmp_path, file_bytes=5 * 4000).save(1, shards(), {})
    assert report.error is None
    assert len(list((tmp_path / "step-000001").glob("*.safetensors"))) == 12
    assert most <= 5 + 3, f"{most} tensors of 60 were held at once, files take 5"


def test_a_shard_that_no_rank_gave_is_found_before_anything_is_published(tmp_path: Path) -> None:
    tensors = training_state()

    def only_rank_0(rank: int) -> list[Shard]:  # what accelerate 4206 did: the other ranks' slices are never written
        return list(rows_of(tensors, rank, 2)) if rank == 0 else []

    reports = save_on_ranks(tmp_path, only_rank_0, world_size=2, step=5)
    assert all(report.error is not None for report in reports)
    assert "layers.0.weight (parameter, shape [7, 5]): the pieces hold 20 of the tensor's 35 elements" in str(reports[0].error)
    assert list(tmp_path.iterdir()) == []


def test_a_piece_that_two_ranks_gave_is_found(tmp_path: Path) -> None:
    tensors = training_state()
    reports = save_on_ranks(tmp_path, lambda rank: whole(tensors), world_size=2, step=5)
    assert "overlap" in str(reports[0].error)
    assert CheckpointStore(tmp_path).latest() is None


def test_ranks_that_disagree_on_a_tensor_are_found(tmp_path: Path) -> None:
    def shards(rank: int) -> list[Shard]:
        dtype = torch.float32 if rank else torch.bfloat16
        return [Shard("weight", "parameter", (4, 2), (2 * rank, 0), torch.zeros(2, 2, dtype=dtype))]

    reports = save_on_ranks(tmp_path, shards, world_size=2, step=5)
    assert "BF16 [4, 2] on one rank and F32 [4, 2] on another" in str(reports[0].error)


def test_a_type_that_cannot_be_stored_is_named_and_no_rank_hangs(tmp_path: Path) -> None:
    def shards(rank: int) -> list[Shard]:
        dtype = torch.complex64 if rank else torch.float32
        return [Shard(f"weight.{rank}", "parameter", (2,), (0,), torch.zeros(2, dtype=dtype))]

    reports = save_on_ranks(tmp_path, shards, world_size=2, step=5)
    assert all("weight.1 (parameter) has type torch.complex64" in str(report.error) for report in reports)


def test_a_state_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for state in ({"loss": float("nan")}, {"folder": tmp_path}):
        with pytest.raises(ValueError):
            store.save(1, whole(training_state()), state)
    assert list(tmp_path.iterdir()) == []


def test_saving_the_same_again_writes_nothing_and_saving_something_else_replaces_it(tmp_path: Path) -> None:
    tensors = training_state(1)
    save_on_ranks(tmp_path, lambda rank: rows_of(tensors, rank, 2), world_size=2, step=3, state={"a": 1})
    before = (tmp_path / "step-000003" / "manifest.json").stat()
    drained = []

    def shards(rank: int) -> Iterator[Shard]:
        for shard in rows_of(tensors, rank, 2):
            drained.append(rank)
            yield shard

    reports = save_on_ranks(tmp_path, shards, world_size=2, step=3, state={"a": 1})
    assert [report.unchanged for report in reports] == [True, True] and not reports[0].error
    after = (tmp_path / "step-000003" / "manifest.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert {0, 1} == set(drained), "making shards may be a collective: every rank runs them to their end"

    changed = training_state(2)
    reports = save_on_ranks(tmp_path, lambda rank: rows_of(changed, rank, 2), world_size=2, step=3, state={"a": 2})
    assert [report.unchanged for report in reports] == [False, False] and not reports[0].error
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
    checkpoint = CheckpointStore(tmp_path).latest()
    assert checkpoint is not None and checkpoint.state == {"a": 2} and same_tensors(checkpoint, changed)


def test_an_error_in_the_model_is_raised_and_the_half_save_is_cleared_by_the_next(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def shards() -> Iterator[Shard]:
        yield from list(whole(training_state()))[:2]
        raise RuntimeError("the device was lost")

    with pytest.raises(RuntimeError, match="device was lost"):
        store.save(1, shards(), {})
    assert CheckpointStore(tmp_path).latest() is None
    assert store.save(2, whole(training_state()), {}).error is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_fingerprints_that_differ_are_named_with_both_values(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, fingerprints={"data": "abc", "seed": 1}).save(1, whole(training_state()), {})
    store = CheckpointStore(tmp_path, fingerprints={"data": "xyz", "seed": 1})
    checkpoint = store.latest()
    assert checkpoint is not None
    assert store.mismatches(checkpoint) == [f"data is 'xyz' in this run and 'abc' in {checkpoint.folder}"]
