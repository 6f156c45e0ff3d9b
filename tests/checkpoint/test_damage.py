from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.layouts import rows_of, same_tensors, save_on_ranks, training_state
from fleetune.checkpoint.manifest import digest_of
from fleetune.checkpoint.store import CheckpointStore

SHARD = "rank-00001-0000.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks, 10 and 20; tests damage copies of the second."""
    folder = tmp_path_factory.mktemp("pristine") / "checkpoints"
    for step in (10, 20):
        ranks = [list(rows_of(training_state(step), rank, 2)) for rank in range(2)]
        reports = save_on_ranks(folder, ranks.__getitem__, world_size=2, step=step, fingerprints={"data": "abc"})
        assert reports[0].error is None
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


def refused(folder: Path, file: str) -> str:
    """The previous checkpoint is found in place of step 20, which is refused by the name of `file`; the cause is returned."""
    store = CheckpointStore(folder)
    latest = store.latest()
    assert latest is not None and latest.step == 10 and same_tensors(latest, training_state(10))
    assert [(refusal.step, refusal.file) for refusal in store.refused] == [(20, file)], store.refused
    assert str(folder / "step-000020") in str(store.refused[0]) and file in str(store.refused[0])
    assert store.all_steps() == [10] and store.at(20) is None
    return store.refused[0].cause


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def zero_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle - 50 : middle + 50] = bytes(100)
    path.write_bytes(data)


MUTATIONS: dict[str, Callable[[Path], object]] = {
    "first bit": lambda path: flip(path, 0),
    "middle bit": lambda path: flip(path, path.stat().st_size // 2),
    "last bit": lambda path: flip(path, path.stat().st_size - 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 2),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "zero page": zero_page,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename(path.parent.parent / "moved"), path.symlink_to("../moved")),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00000-0000.safetensors", SHARD])
def test_a_damaged_file_is_refused_by_name_and_the_previous_checkpoint_is_used(folder: Path, file: str, mutation: str) -> None:
    MUTATIONS[mutation](folder / "step-000020" / file)
    refused(folder, file)


@pytest.mark.parametrize("position", range(0, 1200, 37))
def test_every_flipped_bit_is_found(folder: Path, position: int) -> None:
    file = folder / "step-000020" / SHARD
    flip(file, position % file.stat().st_size)
    refused(folder, SHARD)


def test_files_swapped_within_a_checkpoint_are_refused(folder: Path) -> None:
    step = folder / "step-000020"
    (step / SHARD).rename(step / "aside")
    (step / "rank-00000-0000.safetensors").rename(step / SHARD)
    (step / "aside").rename(step / "rank-00000-0000.safetensors")
    refused(folder, "rank-00000-0000.safetensors")


def test_a_file_of_another_checkpoint_is_refused(folder: Path) -> None:
    shutil.copy(folder / "step-000010" / SHARD, folder / "step-000020" / SHARD)
    refused(folder, SHARD)


def test_a_manifest_of_another_checkpoint_is_refused(folder: Path) -> None:
    shutil.copy(folder / "step-000010" / "manifest.json", folder / "step-000020" / "manifest.json")
    refused(folder, "manifest.json")


def test_a_second_manifest_and_strange_files_change_nothing(folder: Path) -> None:
    step = folder / "step-000020"
    shutil.copy(folder / "step-000010" / "manifest.json", step / "manifest (copy).json")
    (step / "rank-00002-0000.safetensors").write_bytes(b"strange")
    (step / "optimizer.pt").write_bytes(pickle.dumps({}))
    latest = CheckpointStore(folder).latest()
    assert latest is not None and latest.step == 20 and same_tensors(latest, training_state(20))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    if isinstance(value, list):
        return [*value, 0]
    return {**value, "more": 0}


def write_manifest(folder: Path, value: dict[str, Any], *, forge: bool = False) -> None:
    value = {key: item for key, item in value.items() if key != "sha256"} if forge else value
    if forge:
        value = {**value, "sha256": digest_of(value)}
    (folder / "step-000020" / "manifest.json").write_text(json.dumps(value))


def place(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def test_every_field_of_the_manifest_is_protected(folder: Path) -> None:
    manifest = json.loads((folder / "step-000020" / "manifest.json").read_text())
    paths = list(leaves(manifest))
    assert len(paths) > 200
    for path in paths:
        mutated = copy.deepcopy(manifest)
        place(mutated, path)[path[-1]] = changed(place(mutated, path)[path[-1]])
        write_manifest(folder, mutated)
        store = CheckpointStore(folder)
        latest = store.latest()
        assert latest is not None and latest.step == 10, path
        assert [refusal.file for refusal in store.refused] == ["manifest.json"], path
    write_manifest(folder, manifest)
    assert CheckpointStore(folder).all_steps() == [10, 20]


def test_a_missing_field_of_the_manifest_is_refused_even_with_a_forged_digest(folder: Path) -> None:
    manifest = json.loads((folder / "step-000020" / "manifest.json").read_text())
    for path in [path for path in leaves(manifest) if isinstance(place(manifest, path), dict) and path[0] not in ("state",)]:
        if path[0] in ("sha256", "fingerprints") and len(path) > 1:
            continue
        for forge in (False, True):
            if forge and path == ("sha256",):
                continue
            mutated = copy.deepcopy(manifest)
            del place(mutated, path)[path[-1]]
            write_manifest(folder, mutated, forge=forge)
            store = CheckpointStore(folder)
            latest = store.latest()
            assert latest is not None and latest.step == 10, path


def forged(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    mutated = copy.deepcopy(manifest)
    keys = [int(key) if key.isdigit() else key for key in path.split("/")]
    place(mutated, tuple(keys))[keys[-1]] = value
    return mutated


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2),
        ("version", True),
        ("version", "1"),
        ("step", -1),
        ("step", 20.0),
        ("step", True),
        ("step", 21),
        ("best", 1),
        ("world_size", 0),
        ("state", []),
        ("fingerprints", None),
        ("files", []),
        ("tensors", {}),
        ("tensors/0/name", 3),
        ("tensors/0/role", ""),
        ("tensors/0/dtype", ["F32"]),
        ("tensors/0/dtype", "OBJECT"),
        ("tensors/0/dtype", "F64"),
        ("tensors/0/global_shape", [7, 6]),
        ("tensors/0/global_shape", [7, -5]),
        ("tensors/0/pieces", []),
        ("tensors/0/pieces/0/key", "parameter:bias@0"),
        ("tensors/0/pieces/0/file", "../step-000010/rank-00000-0000.safetensors"),
        ("tensors/0/pieces/0/file", "rank-00009-0000.safetensors"),
        ("tensors/0/pieces/0/offset", [3, 0]),
        ("tensors/0/pieces/0/offset", [0]),
        ("tensors/0/pieces/0/shape", [3, 5]),
        ("tensors/0/pieces/0/shape", [2**63, 5]),
    ],
)
def test_a_forged_manifest_with_a_right_digest_is_refused(folder: Path, path: str, value: Any) -> None:
    manifest = json.loads((folder / "step-000020" / "manifest.json").read_text())
    write_manifest(folder, forged(manifest, path, value), forge=True)
    store = CheckpointStore(folder)
    latest = store.latest()
    assert latest is not None and latest.step == 10
    assert len(store.refused) == 1


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/rank-00000-0000.safetensors",
        "rank-00000-0000.safetensors\x00",
        "rank-00000-0000.safetensors\n",
        "..",
        "weights.pt",
        "rank-00000-0000.pkl",
        "manifest.json",
    ],
)
def test_a_manifest_can_name_no_file_but_the_checkpoint_s_own(folder: Path, name: str) -> None:
    (folder / "secret.safetensors").write_bytes((folder / "step-000020" / SHARD).read_bytes())
    manifest = json.loads((folder / "step-000020" / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"].pop(SHARD)
    for tensor in manifest["tensors"]:
        for piece in tensor["pieces"]:
            piece["file"] = name if piece["file"] == SHARD else piece["file"]
    write_manifest(folder, manifest, forge=True)
    assert "is not of the form" in refused(folder, "manifest.json")


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_a_pickle_that_calls_itself_safetensors_is_refused_and_never_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "code was run"
    payload = pickle.dumps(Payload(mark))
    file = folder / "step-000020" / SHARD
    file.write_bytes(payload)
    manifest = json.loads((folder / "step-000020" / "manifest.json").read_text())
    import hashlib

    manifest["files"][SHARD] = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    write_manifest(folder, manifest, forge=True)
    assert "header" in refused(folder, SHARD)
    assert not mark.exists()
    pickle.loads(payload)  # noqa: S301  the payload is a live one
    assert mark.exists()


def test_a_header_of_ten_gigabytes_is_refused_without_being_read(folder: Path) -> None:
    import hashlib

    content = struct.pack("<Q", 10 << 30) + bytes(100)
    (folder / "step-000020" / SHARD).write_bytes(content)
    manifest = json.loads((folder / "step-000020" / "manifest.json").read_text())
    manifest["files"][SHARD] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(folder, manifest, forge=True)
    assert "claims 10,737,418,240 bytes" in refused(folder, SHARD)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"version": 1, "version": 1}',
        b'{"version": NaN}',
        b"\x00" * 50,
    ],
)
def test_a_manifest_of_rubbish_is_refused(folder: Path, content: bytes) -> None:
    (folder / "step-000020" / "manifest.json").write_bytes(content)
    refused(folder, "manifest.json")
