from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fleetune.spec.errors import CheckFailed
from fleetune.training.result import check_saved, published


def test_a_result_that_fails_half_way_leaves_the_old_one_and_nothing_else(tmp_path: Path):
    with published(tmp_path / "adapter") as folder:
        (folder / "a").write_text("old")
    with pytest.raises(RuntimeError), published(tmp_path / "adapter") as folder:
        (folder / "a").write_text("new")
        raise RuntimeError
    assert (tmp_path / "adapter" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_new_result_takes_the_old_ones_place(tmp_path: Path):
    for text in ("old", "new"):
        with published(tmp_path / "model") as folder:
            (folder / text).write_text(text)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_saved_tensor_that_is_absent_or_empty_is_named(tmp_path: Path):
    save_file({"a": torch.ones(2), "b": torch.ones(0, 3)}, tmp_path / "model.safetensors")
    check_saved(tmp_path, {"a"})
    with pytest.raises(CheckFailed, match="lacks the tensor c"):
        check_saved(tmp_path, {"a", "c"})
    with pytest.raises(CheckFailed, match=r"b with shape \(0, 3\)"):
        check_saved(tmp_path, {"a", "b"})
