from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.models.precision import MARGIN, check_precision, probe_precision, processor, time_products
from fleetune.spec.errors import UserError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEETUNE_CACHE", str(tmp_path))
    return tmp_path


def test_a_cpu_computes_in_what_is_really_faster(cache: Path) -> None:
    """The answer agrees with a measurement of our own, unless that one lies too near the margin to tell."""
    chosen = probe_precision("cpu")
    seconds = time_products()
    ratio = seconds["fp32"] / seconds["bf16"]
    assert chosen in ("fp32", "bf16")
    if ratio < MARGIN / 1.5:
        assert chosen == "fp32", seconds
    if ratio > MARGIN * 1.5:
        assert chosen == "bf16", seconds


def test_a_cpu_without_instructions_for_bf16_computes_in_fp32(cache: Path) -> None:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("no /proc/cpuinfo on this machine")
    if any(flag in flags for flag in ("amx_bf16", "avx512_bf16", "bf16")):
        pytest.skip("this CPU has instructions for bf16")
    assert probe_precision("cpu") == "fp32"


def test_the_answer_is_remembered_and_found_without_torch(cache: Path) -> None:
    chosen = probe_precision("cpu")
    (path,) = (cache / "precision").iterdir()
    kept = json.loads(path.read_text())
    assert kept["precision"] == chosen and set(kept["seconds"]) == {"fp32", "bf16"}
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fleetune.models.precision import probe_precision; print(probe_precision('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == chosen


def test_what_was_measured_on_another_processor_does_not_count(cache: Path) -> None:
    chosen = probe_precision("cpu")
    other = "bf16" if chosen == "fp32" else "fp32"
    (path,) = (cache / "precision").iterdir()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "key": "another processor", "precision": other}))
    assert probe_precision("cpu") == chosen
    path.write_text("not json")
    assert probe_precision("cpu") == chosen


def test_a_processor_is_told_by_name_and_instructions() -> None:
    assert processor() == processor() and len(processor()) > 12


@pytest.mark.claim(
    "X23",
    command="fleetune train",
    seen="bf16 where it is fast, else fp16 with a loss scale, fp32 on a CPU without either",
)
@pytest.mark.cuda
def test_a_gpu_computes_in_bf16_where_its_tensor_cores_do(cache: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    expected = "bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp16"
    assert probe_precision("cuda") == probe_precision("cuda:0") == expected


def test_a_machine_takes_what_the_first_one_chose_unless_it_would_have_to_emulate_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe_precision("cpu")
    (path,) = (cache / "precision").iterdir()
    kept = json.loads(path.read_text())
    # Near the margin: noise has chosen otherwise here, which is no reason to refuse.
    path.write_text(json.dumps({**kept, "precision": "fp32", "seconds": {"fp32": 1.0, "bf16": 1.0}}))
    check_precision("bf16", "cpu")
    check_precision("fp32", "cpu")
    path.write_text(json.dumps({**kept, "precision": "fp32", "seconds": {"fp32": 1.0, "bf16": 40.0}}))
    emulates = time_products()
    if emulates["bf16"] > 4 * emulates["fp32"]:
        with pytest.raises(UserError, match=r"emulates.*give --precision fp32"):
            check_precision("bf16", "cpu")
    else:
        check_precision("bf16", "cpu")  # measured again, since a busy machine may have said so for a moment
    for capability, refused in ((7, 5), True), ((8, 0), False):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
        if refused:
            with pytest.raises(UserError, match=r"Tesla T4 \(7\.5\) has no tensor cores for it: give --precision fp16"):
                check_precision("bf16", "cuda")
        else:
            check_precision("bf16", "cuda")
