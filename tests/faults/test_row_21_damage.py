"""Row 21: every file of the newest checkpoint is damaged in every way: refused by its name, and the older one is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Faulted, Place
from journeys.journey import fleetune


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def zero_page(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-256] + bytes(min(256, len(data))))


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = [truncate, flip, zero_page, remove]


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_refused_by_name_and_the_run_goes_on_from_the_older(
    place: Place, golden: Callable[..., Path], stopped: Faulted, damage: Callable[[Path], None]
) -> None:
    newest = max((stopped.path / "checkpoints").glob("step-*"))
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    assert len(files) >= 3, "the manifest, and what each rank has written"
    for name in files:
        copy = place.folder / (place.prefix + re_name(name))
        shutil.copytree(stopped.path, copy)
        damage(copy / "checkpoints" / newest.name / name)
        done = fleetune(*place.words(str(copy), "--gpus", "2", "--resume"), cwd=place.folder)
        assert done.returncode == 0, done.stderr
        assert newest.name in done.stderr, f"the damage of {name} was not told: {done.stderr}"
        if name.name != "manifest.json" or damage is not remove:
            assert name.name in done.stderr, f"{name} was not named"
        verified = fleetune("verify", copy, "--against", golden("--gpus", "2"), "--bitwise", cwd=place.folder)
        assert verified.returncode == 0, verified.stdout
        shutil.rmtree(copy)


def re_name(name: Path) -> str:
    return str(name).replace("/", "-")


@pytest.mark.long
def test_files_that_were_swapped_and_a_manifest_of_another_checkpoint_are_refused(
    place: Place, golden: Callable[..., Path], stopped: Faulted
) -> None:
    copy = place.folder / (place.prefix + "swapped")
    shutil.copytree(stopped.path, copy)
    older, newest = sorted((copy / "checkpoints").glob("step-*"))[-2:]
    shutil.copyfile(older / "manifest.json", newest / "manifest.json")
    done = fleetune(*place.words(str(copy), "--gpus", "2", "--resume"), cwd=place.folder)
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr
    verified = fleetune("verify", copy, "--against", golden("--gpus", "2"), "--bitwise", cwd=place.folder)
    assert verified.returncode == 0, verified.stdout
