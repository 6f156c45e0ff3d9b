"""Prepared data is complete or absent: two at once, a kill, a full disk, a place that cannot be written to."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from data.material import Prepare, left_behind, rows, samples, write
from fleetune.data.keys import FileHashes, tokenizer_fingerprint
from fleetune.data.prepare import PreparedData
from fleetune.spec.errors import UserError


def test_two_that_prepare_the_same_at_once_do_it_once(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", rows(300))
    found: list[PreparedData] = []
    worked: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(prepare(file, progress=lambda _: worked.append(threading.current_thread().name)))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({prepared.store for prepared in found}) == 1
    assert len(found) == 4
    assert len(set(worked)) == 1
    assert left_behind(tmp_path) == []


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; returns its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", rows(2000))

    def die(done: int) -> None:
        if done:
            os.kill(os.getpid(), signal.SIGKILL)

    status = in_child(lambda: prepare(file, progress=die) and None)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(left_behind(tmp_path)) == 1
    assert len(samples(prepare(file).store)) == 2000
    assert left_behind(tmp_path) == []


def test_a_full_disk_is_told_and_what_was_written_is_removed(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", rows(2000))

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with pytest.raises(UserError, match=r"cannot be written to .*FLEETUNE_CACHE"):
            prepare(file)

    assert in_child(full) == 0
    assert left_behind(tmp_path) == []


def test_a_cache_that_cannot_be_made_is_told_with_the_fix(tmp_path: Path, prepare: Prepare) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="set FLEETUNE_CACHE"):
        prepare(write(tmp_path / "a.jsonl", rows(1)), cache=tmp_path / "file")


def test_the_prepared_data_of_a_person_is_private(tmp_path: Path, prepare: Prepare) -> None:
    prepared = prepare(write(tmp_path / "a.jsonl", rows(1)))
    assert (tmp_path / "cache" / "data").stat().st_mode & 0o077 == 0
    assert prepared.store.stat().st_mode & 0o077 == 0


def test_hashes_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", rows(3))
    os.utime(file, ns=(10**18, 10**18))
    hashes = FileHashes(tmp_path / "hashes.json")
    first = hashes.of(file)
    hashes.remember()
    known = json.loads((tmp_path / "hashes.json").read_text())["files"]
    assert known[str(file)][-1] == first
    known[str(file)][-1] = "remembered"
    (tmp_path / "hashes.json").write_text(json.dumps({"version": 1, "files": known}))
    assert FileHashes(tmp_path / "hashes.json").of(file) == "remembered"
    write(file, rows(4))
    assert FileHashes(tmp_path / "hashes.json").of(file) not in ("remembered", first)


def test_a_torn_memory_of_hashes_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "hashes.json").write_text('{"version": 1, "fil')
    assert FileHashes(tmp_path / "hashes.json").of(write(tmp_path / "a.jsonl", rows(1)))


def test_a_tokenizers_fingerprint_is_of_its_files_and_its_template(tiny_llama: Path, tmp_path: Path) -> None:
    import shutil

    copied = tmp_path / "model"
    shutil.copytree(tiny_llama, copied)
    first = tokenizer_fingerprint(tiny_llama)
    assert tokenizer_fingerprint(copied) == first
    (copied / "model.safetensors").write_bytes(b"other weights")
    assert tokenizer_fingerprint(copied) == first
    assert tokenizer_fingerprint(copied, chat_template="{{ messages }}") != first
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_fingerprint(copied) != first


def test_what_is_prepared_is_found_without_loading_any_library_for_it(tmp_path: Path, prepare: Prepare) -> None:
    file = write(tmp_path / "a.jsonl", rows(3))
    first = prepare(file)
    script = (
        "import sys\nfrom pathlib import Path\nfrom fleetune.data.prepare import DataRequest, prepare_data\n"
        "request = DataRequest(data=(sys.argv[1],), tokenizer_fingerprint='tiny', cache=Path(sys.argv[2]), max_bad_share=0.5)\n"
        "print(prepare_data(request, lambda: sys.exit('tokenised again')).fingerprint)\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'jinja2', 'pyarrow', 'pydantic'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, str(file), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == [first.fingerprint, "[]"]
