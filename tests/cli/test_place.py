from __future__ import annotations

import os

import pytest

from fleetune.cli.place import opened
from fleetune.launch.lease import Lease
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder


def begin(folder: RunFolder) -> None:
    folder.plan.write_text("{}")
    folder.spec.write_text("version: 1\n")
    (folder.logs / "prepare.log").write_text("x")


def names(path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.mark.parametrize("error", [UserError("mend it"), OSError(28, "No space left on device")])
def test_a_start_that_fails_leaves_nothing_behind(tmp_path, error):
    folder = RunFolder(tmp_path / "runs" / "deep" / "new")
    with pytest.raises(type(error)), opened(folder):
        begin(folder)
        raise error
    assert names(tmp_path) == []


def test_a_preparation_that_failed_leaves_the_rows_that_were_set_aside(tmp_path):
    folder = RunFolder(tmp_path / "new")
    with opened(folder) as place:
        begin(folder)
        folder.quarantine.write_text("{}\n")
        place.failed = True
    assert names(folder.path) == ["quarantine.jsonl"]
    with opened(folder):
        begin(folder)
    assert folder.exists(), "and the same folder may be used again"


def test_a_run_that_was_prepared_is_never_taken_back(tmp_path):
    folder = RunFolder(tmp_path / "new")
    with pytest.raises(UserError), opened(folder) as place:
        begin(folder)
        folder.prepared.write_text("{}")
        place.failed = True
        raise UserError("later")
    assert folder.exists() and (folder.logs / "prepare.log").exists()


def test_a_crash_or_an_interrupt_leaves_the_run_to_be_resumed(tmp_path):
    for error in (RuntimeError, KeyboardInterrupt):
        folder = RunFolder(tmp_path / error.__name__)
        with pytest.raises(error), opened(folder):
            begin(folder)
            raise error
        assert folder.exists()


def test_an_earlier_run_is_never_taken_back(tmp_path):
    folder = RunFolder(tmp_path / "old")
    folder.create()
    begin(folder)
    with pytest.raises(UserError), opened(folder):
        raise UserError("mend it")
    assert folder.exists() and (folder.logs / "prepare.log").exists()


def test_a_live_run_in_the_folder_is_left_alone(tmp_path):
    folder = RunFolder(tmp_path / "live")
    folder.create()
    with Lease.take(folder):
        with pytest.raises(UserError, match="live"), opened(folder):
            pytest.fail("two runs live in one folder")
        assert folder.lease.exists() and folder.logs.is_dir()


def test_the_folder_is_private(tmp_path):
    with opened(RunFolder(tmp_path / "runs" / "new")):
        assert (tmp_path / "runs" / "new").stat().st_mode & 0o077 == 0
