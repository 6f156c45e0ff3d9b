from __future__ import annotations

import errno
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.cli.exits import guarded
from fleetune.spec.errors import CheckFailed, Preempted, UserError


def run(error: BaseException) -> int:
    def command() -> int:
        raise error

    return guarded(command)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75])
def test_a_commands_own_code_is_kept(code):
    assert guarded(lambda: code) == code


@pytest.mark.claim(
    "H35",
    command="fleetune train",
    seen="memory that is used up is one line",
)
@pytest.mark.claim(
    "X39",
    command="fleetune train",
    seen="one line",
)
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            UserError("a is wrong: mend it", "b is wrong: mend it"),
            2,
            "error: a is wrong: mend it\nerror: b is wrong: mend it\n",
        ),
        (CheckFailed("the export differs"), 3, "error: the export differs\n"),
        (Preempted("saved after step 3; go on with --resume"), 75, "saved after step 3; go on with --resume\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (BrokenPipeError(), 0, ""),
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/x"),
            2,
            "error: /runs/x: No space left on device: make room or give another place\n",
        ),
        (OSError(errno.EROFS, "Read-only file system"), 2, "error: Read-only file system: make room or give another place\n"),
        (
            ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"),
            2,
            "error: this needs the package torch, which is not installed: pip install torch\n",
        ),
    ],
)
def test_what_is_raised_becomes_one_line_and_a_code(error, code, said, capsys):
    assert run(error) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero\nand more"), MemoryError(), OSError("strange")])
def test_the_unexpected_is_one_line_and_its_traceback_lies_in_a_private_file(error, capsys):
    assert run(error) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    path = Path(re.search(r"traceback is in (\S+)", line)[1])
    assert "Traceback (most recent call last)" in path.read_text() and type(error).__name__ in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()


def test_secrets_are_in_neither_line_nor_file(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    assert run(UserError("model 'https://me:hf_abcdefghijklmnop@hub' is wrong")) == 2
    assert run(ValueError("token hf_abcdefghijklmnop refused")) == 1
    said = capsys.readouterr().err
    path = Path(re.search(r"traceback is in (\S+)", said)[1])
    assert "hf_abcdef" not in said + path.read_text() and "[secret]" in said
    path.unlink()


def test_a_full_disk_behind_standard_output_is_one_error():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "fleetune.cli.main", "presets", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device: make room or give another place\n")
