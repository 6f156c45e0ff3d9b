"""Row 24: a checkpoint made by an enemy: no code of it runs, no file outside is touched, nothing huge is allocated."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.harness import Faulted, Place
from journeys.journey import fleetune


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def pickled(newest: Path, marker: Path) -> None:
    """Files that other libraries would unpickle."""
    for name in ("optimizer.pt", "training_args.bin", ".metadata", "pytorch_model.bin"):
        (newest / name).write_bytes(pickle.dumps(Payload(marker)))
    for path in newest.glob("*.safetensors"):
        path.write_bytes(pickle.dumps(Payload(marker)))


def outside(newest: Path, marker: Path) -> None:
    """The manifest names a file outside the checkpoint."""
    manifest = json.loads((newest / "manifest.json").read_text())
    text = json.dumps(manifest)
    for path in newest.glob("*.safetensors"):
        text = text.replace(f'"{path.name}"', json.dumps("../../../../" + str(marker).lstrip("/")))
    (newest / "manifest.json").write_text(text)


def endless(newest: Path, marker: Path) -> None:
    """A header that says it is ten gigabytes long."""
    for path in newest.glob("*.safetensors"):
        path.write_bytes((10 << 30).to_bytes(8, "little") + path.read_bytes()[8:])


@pytest.mark.long
@pytest.mark.parametrize("attack", [pickled, outside, endless], ids=lambda attack: attack.__name__)
def test_nothing_of_it_is_believed(
    place: Place,
    golden: Callable[..., Path],
    stopped: Faulted,
    tmp_path: Path,
    attack: Callable[[Path, Path], None],
) -> None:
    copy, marker = place.folder / (place.prefix + attack.__name__), tmp_path / "touched"
    shutil.copytree(stopped.path, copy)
    newest = max((copy / "checkpoints").glob("step-*"))
    attack(newest, marker)
    done = fleetune(*place.words(str(copy), "--gpus", "2", "--resume"), cwd=place.folder)
    assert not marker.exists(), "code of a checkpoint was run"
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr, done.stderr
    verified = fleetune("verify", copy, "--against", golden("--gpus", "2"), "--bitwise", cwd=place.folder)
    assert verified.returncode == 0, verified.stdout
