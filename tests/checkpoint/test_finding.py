from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.layouts import same_tensors, training_state, whole
from fleetune.checkpoint.rotation import surplus
from fleetune.checkpoint.store import CheckpointStore


def saved(folder: Path, *steps: int, keep: int = 10, best: int | None = None) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep)
    for step in steps:
        assert store.save(step, whole(training_state(step)), {"step": step}, best=step == best).error is None
    return store


def test_the_latest_is_the_highest_step_whatever_the_times_say(tmp_path: Path) -> None:
    saved(tmp_path, 100, 20, 3)
    for age, step in enumerate((3, 20, 100)):
        os.utime(tmp_path / f"step-{step:06d}", (1e9 - age, 1e9 - age))
    store = CheckpointStore(tmp_path)
    latest = store.latest()
    assert latest is not None and latest.step == 100 and same_tensors(latest, training_state(100))
    assert store.all_steps() == [3, 20, 100]


def test_steps_beyond_six_digits_are_found_in_their_order(tmp_path: Path) -> None:
    store = saved(tmp_path, 999_999, 1_000_000)
    latest = store.latest()
    assert latest is not None and latest.step == 1_000_000
    assert store.all_steps() == [999_999, 1_000_000]


def test_a_place_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent").latest() is None
    (tmp_path / "file").write_text("")
    assert CheckpointStore(tmp_path / "file").all_steps() == []
    for name in ("step-12", "step-00001x", "step-000001.tmp-0a1b2c3d", "step-000001.bak", "notes.txt"):
        (tmp_path / name).mkdir()
    store = CheckpointStore(tmp_path)
    assert store.latest() is None and store.refused == []


def test_a_checkpoint_under_another_step_s_name_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    (tmp_path / "step-000002").rename(tmp_path / "step-000009")
    latest = store.latest()
    assert latest is not None and latest.step == 1
    assert "manifest.json: is of step 2, and its folder is named for step 9" in str(store.refused[0])


def test_a_linked_folder_is_not_followed(tmp_path: Path) -> None:
    saved(tmp_path / "elsewhere", 5)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-000005").symlink_to(tmp_path / "elsewhere" / "step-000005")
    store = CheckpointStore(tmp_path / "run")
    assert store.latest() is None
    assert "link" in store.refused[0].cause


def test_one_step_can_be_asked_for(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    one = store.at(1)
    assert one is not None and one.step == 1 and one.state == {"step": 1}
    assert store.at(3) is None


def test_damage_after_a_first_look_is_noticed_by_the_second(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    assert store.latest() is not None
    file = tmp_path / "step-000002" / "rank-00000-0000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    latest = store.latest()
    assert latest is not None and latest.step == 1
    file.unlink()
    assert store.all_steps() == [1]
    assert store.refused[0].cause == "is missing"


@pytest.mark.parametrize("crash", ["before", "after"])
def test_a_crash_while_a_checkpoint_was_replaced_leaves_one_of_the_two(tmp_path: Path, crash: str) -> None:
    saved(tmp_path, 1, 4)
    aside = tmp_path / "step-000004.old-0123abcd"
    (tmp_path / "step-000004").rename(aside)
    if crash == "after":
        CheckpointStore(tmp_path / "other").save(4, whole(training_state(44)), {})
        (tmp_path / "other" / "step-000004").rename(tmp_path / "step-000004")
        (tmp_path / "other").rmdir()
    store = CheckpointStore(tmp_path)
    latest = store.latest()
    assert latest is not None and latest.step == 4
    assert same_tensors(latest, training_state(4 if crash == "before" else 44))
    assert store.save(5, whole(training_state(5)), {}).error is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]
    kept = store.at(4)
    assert kept is not None and same_tensors(kept, training_state(4 if crash == "before" else 44))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20, 30, 40, 50, keep=2, best=20)
    assert store.all_steps() == [20, 40, 50]
    best = store.best()
    assert best is not None and best.step == 20 and best.best
    store.save(60, whole(training_state(60)), {}, best=True)
    assert store.all_steps() == [50, 60]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000050", "step-000060"]


def test_a_damaged_checkpoint_keeps_no_good_one_from_being_kept(tmp_path: Path) -> None:
    store = saved(tmp_path, 10, 20, keep=2)
    (tmp_path / "step-000020" / "manifest.json").write_bytes(b"{}")
    assert store.save(30, whole(training_state(30)), {}).error is None
    assert store.all_steps() == [10, 30]
    store.save(40, whole(training_state(40)), {})
    assert store.all_steps() == [30, 40]
    assert not (tmp_path / "step-000020").exists(), "damaged, and older than all that are kept"


@pytest.mark.parametrize(
    ("verified", "damaged", "keep", "saved", "gone"),
    [
        ({10: False}, [], 1, 10, []),
        ({10: False, 20: False}, [], 1, 20, [10]),
        ({10: True, 20: False, 30: False}, [], 1, 30, [20]),
        ({10: True, 20: True, 30: False}, [], 1, 30, [10]),
        ({10: False, 20: False, 30: False}, [], 2, 10, []),  # saved after going back: it is never the one to go
        ({10: False, 30: False}, [20], 2, 30, []),
        ({20: False, 30: False}, [10, 40], 2, 30, [10]),
    ],
)
def test_what_goes_is_older_than_what_stays(
    verified: dict[int, bool], damaged: list[int], keep: int, saved: int, gone: list[int]
) -> None:
    assert surplus(verified, damaged, keep=keep, saved=saved) == gone


def test_finding_and_checking_needs_no_torch(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from fleetune.checkpoint.store import CheckpointStore\n"
        f"print(CheckpointStore(Path({str(tmp_path)!r})).latest().step)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "7", done.stderr
