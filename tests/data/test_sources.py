from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from fleetune.data.sources import find_files
from fleetune.spec.errors import UserError

LINE = '{"text": "a"}\n'


def names(tmp_path: Path, *given: str) -> list[str]:
    return [file.id for file in find_files([str(tmp_path / name) for name in given], offline=True).files]


def test_a_missing_file_is_answered_with_a_close_name(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_text(LINE)
    with pytest.raises(UserError, match=r"does not exist: did you mean .*gsm8k_train\.jsonl\?"):
        names(tmp_path, "gsm8k_trian.jsonl")
    with pytest.raises(UserError, match="there is no folder"):
        names(tmp_path, "nowhere/a.jsonl")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(UserError) as raised:
        names(tmp_path, "missing.jsonl", "a.xlsx")
    assert len(raised.value.problems) == 2
    assert "jsonl, json, csv" in raised.value.problems[1]


def test_a_folder_gives_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv", "sub/c.txt", ".hidden.jsonl", "README.md", "picture.png"):
        (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "rows" / name).write_text(LINE)
    (tmp_path / "rows" / "empty.jsonl").touch()
    found = find_files([str(tmp_path / "rows")], offline=True)
    assert [file.id for file in found.files] == ["rows/a.csv", "rows/b.jsonl", "rows/sub/c.txt"]
    assert found.passed_over == ("rows/empty.jsonl: is empty", "rows/picture.png: not a format of rows")


def test_held_out_files_beside_training_files_are_passed_over_and_told(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "test-00000.jsonl", "validation.jsonl", "latest.jsonl"):
        (tmp_path / name).write_text(LINE)
    found = find_files([str(tmp_path)], offline=True)
    assert [file.path.name for file in found.files] == ["latest.jsonl", "train-00000.jsonl"]
    assert len(found.passed_over) == 2


def test_a_folder_without_rows_says_what_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is empty"):
        names(tmp_path, ".")
    (tmp_path / "notes.pdf").touch()
    with pytest.raises(UserError, match=r"notes\.pdf: not a format of rows"):
        names(tmp_path, ".")


@pytest.mark.claim(
    "H12",
    command="fleetune train --data data",
    seen="a cluster file in a data folder is skipped, and refused as rows",
)
def test_a_cluster_file_in_a_data_folder_is_not_rows(tmp_path: Path) -> None:
    cluster = {"distributed_backend": "ray", "node_list": ["10.0.0.1"], "data": [{"text": "x"}]}
    (tmp_path / "config.json").write_text(json.dumps(cluster))
    (tmp_path / "a.jsonl").write_text(LINE)
    found = find_files([str(tmp_path)], offline=True)
    assert [file.path.name for file in found.files] == ["a.jsonl"]
    assert found.passed_over[0].endswith("config.json: describes a cluster")
    with pytest.raises(UserError, match=r"describes a cluster \(distributed_backend, node_list\)"):
        names(tmp_path, "config.json")


def test_a_config_json_that_is_no_cluster_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('[{"text": "a"}]')
    assert names(tmp_path, "config.json") == ["config.json"]


def test_the_same_file_twice_is_answered_with_weights(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINE)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    with pytest.raises(UserError, match=r"given twice.*--data-weights"):
        names(tmp_path, "a.jsonl", "link.jsonl")


def test_files_of_one_name_have_ids_of_their_own(tmp_path: Path) -> None:
    for folder in ("x/one", "y/one", "two"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.jsonl").write_text(LINE)
    assert names(tmp_path, "x/one/a.jsonl", "y/one/a.jsonl", "two/a.jsonl") == ["x/one/a.jsonl", "y/one/a.jsonl", "two/a.jsonl"]


def test_an_id_has_none_of_the_signs_that_part_a_sample_id(tmp_path: Path) -> None:
    (tmp_path / "a:1#2 %3.jsonl").write_text(LINE)
    assert names(tmp_path, "a:1#2 %3.jsonl") == ["a%3a1%232%20%253.jsonl"]


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        names(tmp_path, "a.jsonl")


@pytest.mark.parametrize("name", ["https://example.com/a.jsonl", "s3://bucket/a.jsonl"])
def test_an_address_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="download the file"):
        find_files([name], offline=False)


@pytest.mark.parametrize("name", ["a\0b.jsonl", "x" * 5000 + ".jsonl", "", "-"])
def test_a_name_that_is_none_is_an_error_not_a_crash(name: str) -> None:
    with pytest.raises(UserError, match=r"does not exist|cannot be read|is no name"):
        find_files([name], offline=True)


def cached_data_set(cache: Path, files: dict[str, str]) -> None:
    """A data set as the hub's client keeps it after a download."""
    folder = cache / "datasets--someone--rows"
    snapshot = folder / "snapshots" / ("0" * 40)
    for name, content in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(content)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_hub_data_set_in_the_cache_is_read_offline(hub_cache: Path) -> None:
    cached_data_set(hub_cache, {"train.jsonl": LINE, "test.jsonl": LINE, "README.md": "x"})
    found = find_files(["someone/rows"], offline=True)
    assert [file.id for file in found.files] == ["someone/rows/train.jsonl"]
    assert found.passed_over == ("someone/rows/test.jsonl: held-out rows by its name",)


def test_a_hub_data_set_of_several_sets_asks_which(hub_cache: Path) -> None:
    cached_data_set(hub_cache, {"main/train.jsonl": LINE, "hard/train.jsonl": LINE})
    with pytest.raises(UserError, match=r"several sets: give one of someone/rows/hard, someone/rows/main"):
        find_files(["someone/rows"], offline=True)
    assert [file.id for file in find_files(["someone/rows/hard"], offline=True).files] == ["someone/rows/hard/train.jsonl"]


def test_a_hub_data_set_that_is_not_in_the_cache_opens_no_connection_offline(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(UserError, match="--offline or HF_HUB_OFFLINE forbids"):
        find_files(["someone/other"], offline=True)


def test_a_hub_that_cannot_be_reached_is_a_clear_error(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="no local path, and as a hub data set it cannot be fetched"):
        find_files(["someone/other"], offline=False)


def test_a_mistyped_path_is_not_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="did you mean"):
        find_files(["data/trian"], offline=False)
