"""Each rule for a stranger's weight files, with the attack it is for."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from fleetune.models.weight_files import number_formats
from fleetune.models.weight_files import read_weights_header as read_header
from fleetune.spec.errors import UserError
from fleetune.spec.safetensors_header import INDEX_FILE, SINGLE_FILE, weight_files


def write_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_an_honest_header_is_read_as_safetensors_reads_it(tiny_llama: Path) -> None:
    from safetensors import safe_open

    header = read_header(tiny_llama / SINGLE_FILE)
    with safe_open(tiny_llama / SINGLE_FILE, framework="np") as file:
        assert set(header) == set(file.keys())
        raw = (tiny_llama / SINGLE_FILE).read_bytes()
        for name, tensor in header.items():
            assert tensor.shape == tuple(file.get_slice(name).get_shape())
            assert raw[tensor.start : tensor.end] == file.get_tensor(name).tobytes()
    assert number_formats(tiny_llama) == {"F32"}


def test_a_header_of_ten_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_file(tmp_path / SINGLE_FILE, {}, length=10 << 30)
    with open(path, "r+b") as file:
        file.truncate(11 << 30)  # sparse: the file does have that many bytes
    with pytest.raises(UserError, match="10,737,418,240 bytes"):
        read_header(path)


LIES = {
    "beyond the end": ({"a": entry(offsets=(0, 8))}, b"1234"),
    "a hole": ({"a": entry(), "b": entry(offsets=(16, 24))}, b"0" * 24),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, b"0" * 12),
    "trailing bytes": ({"a": entry()}, b"0" * 12),
    "negative": ({"a": entry(offsets=(-8, 0))}, b"0" * 8),
    "size and shape differ": ({"a": entry(shape=(3,))}, b"0" * 8),
    "overflowing shape": ({"a": entry(shape=(2**40, 2**40), offsets=(0, 8))}, b"0" * 8),
    "text as offset": ({"a": {**entry(), "data_offsets": ["0", "8"]}}, b"0" * 8),
    "one offset": ({"a": {**entry(), "data_offsets": [8]}}, b"0" * 8),
    "true as a size": ({"a": {**entry(), "shape": [True, 2]}}, b"0" * 8),
    "a name twice": (b"{" + b",".join([b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'] * 2) + b"}", b"0" * 8),
    "no description": ({"a": 7}, b""),
    "no JSON": (b"{{{{", b""),
    "a list": (b"[1,2]", b""),
    "not UTF-8": (b'{"\xff":1}', b""),
    "too deep": (b"[" * 200_000, b""),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_a_header_that_lies_about_its_file_is_refused(lie: str, tmp_path: Path) -> None:
    header, data = LIES[lie]
    with pytest.raises(UserError, match="damaged"):
        read_header(write_file(tmp_path / SINGLE_FILE, header, data))


@pytest.mark.parametrize("raw", [b"", b"1234", struct.pack("<Q", 100) + b"{}"], ids=["empty", "four bytes", "cut header"])
def test_a_cut_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(raw)
    with pytest.raises(UserError, match="damaged"):
        read_header(tmp_path / SINGLE_FILE)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4", "object", 5])
def test_a_packed_or_unknown_number_format_is_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stores a as F8_E4M3|format .* is not known"):
        read_header(write_file(tmp_path / SINGLE_FILE, {"a": entry(dtype=dtype, shape=(8,))}, b"0" * 8))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "a\\b.safetensors", "x.bin", "a\0.safetensors", ""]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(tmp_path / SINGLE_FILE, {"a": entry()}, b"0" * 8)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
    with pytest.raises(UserError, match="no plain name"):
        weight_files(folder)


def test_an_index_names_every_part_that_is_absent(tmp_path: Path) -> None:
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        weight_files(tmp_path)
    assert len(caught.value.problems) == 2


class Payload:
    """What a poisoned checkpoint holds: unpickling it runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "weights.ckpt"])
def test_pickled_weights_are_refused_and_not_run(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(UserError, match=f"{name}.*pickles.*save_pretrained"):
        weight_files(folder)
    assert not marker.exists()


def test_a_pickle_that_calls_itself_safetensors_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / SINGLE_FILE).write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(UserError):
        read_header(tmp_path / SINGLE_FILE)
    assert not marker.exists()
