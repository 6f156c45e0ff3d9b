from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiny
import tiny_gguf
from fleetune.models.cache import cache_folder
from fleetune.models.locate import locate
from fleetune.models.weight_files import number_formats
from fleetune.models.weights import prepare_model
from fleetune.spec.errors import UserError

PREPARE = (
    "import sys, time\n"
    "from fleetune.models.locate import locate\n"
    "from fleetune.models.weights import prepare_model\n"
    "began = time.monotonic()\n"
    "made = prepare_model(locate(sys.argv[1]), dtype=sys.argv[2])\n"
    "print(made.folder)\n"
    "print(time.monotonic() - began, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLEETUNE_CACHE", str(folder))
    return folder


def prepare_elsewhere(model: Path, dtype: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(model), dtype]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def sharded(folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    tiny.write_model(folder, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_a_folder_that_is_already_right_is_used_where_it_is(tiny_llama: Path, cache: Path) -> None:
    prepared = prepare_model(locate(tiny_llama), dtype="fp32")
    assert prepared.folder == tiny_llama and prepared.adapter is None
    assert prepared.fingerprint == locate(tiny_llama).fingerprint
    assert not (cache / "models").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_another_number_format_is_a_copy_with_the_same_rounded_weights(dtype: str, tiny_llama: Path, cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepared = prepare_model(locate(tiny_llama), dtype=dtype)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert prepared.folder.parent == cache / "models"
    source, made = tensors(tiny_llama), tensors(prepared.folder)
    assert source.keys() == made.keys()
    assert all(torch.equal(made[name], tensor.to(wanted)) for name, tensor in source.items())
    model = AutoModelForCausalLM.from_pretrained(prepared.folder, local_files_only=True)
    assert model.dtype == wanted
    text = "The quick brown fox"
    assert AutoTokenizer.from_pretrained(prepared.folder)(text) == AutoTokenizer.from_pretrained(tiny_llama)(text)
    assert prepared.fingerprint == prepare_model(locate(tiny_llama), dtype="fp32").fingerprint


def test_a_model_in_several_files_stays_in_several_files(tmp_path: Path, cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = sharded(tmp_path / "sharded")
    made = prepare_model(locate(folder), dtype="bf16").folder
    assert {path.name for path in made.glob("*.safetensors")} == {path.name for path in folder.glob("*.safetensors")}
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(made).values())
    model, info = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not info["missing_keys"] and model.dtype == torch.bfloat16


def test_every_tensor_is_aligned_for_memory_mapping(tmp_path: Path, cache: Path) -> None:
    """A mask of single bytes between floats must not shift the floats off their boundaries."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from fleetune.spec.safetensors_header import read_header

    folder = tiny.write_model(tmp_path / "m", "llama")
    values = load_file(folder / "model.safetensors")
    mask, numbers = np.ones(3, dtype=np.bool_), np.arange(5, dtype=np.int64)
    save_file({**values, "a.mask": mask, "a.numbers": numbers}, folder / "model.safetensors", metadata={"format": "pt"})
    made = prepare_model(locate(folder), dtype="bf16").folder / "model.safetensors"
    header = read_header(made)
    assert all(header[name].start % {"BF16": 2, "I64": 8, "BOOL": 1}[header[name].dtype] == 0 for name in header)
    import torch
    from safetensors.torch import load_file as load_torch

    assert torch.equal(load_torch(made)["a.numbers"], torch.arange(5)) and load_torch(made)["a.mask"].all()


def test_a_value_that_fp16_cannot_hold_is_refused_and_nothing_stays_behind(tmp_path: Path, cache: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny.write_model(tmp_path / "m", "llama")
    values = load_file(folder / "model.safetensors")
    values["model.norm.weight"][3] = 1e6
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight.*1e\+06.*--precision bf16"):
        prepare_model(locate(folder), dtype="fp16")
    assert [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_the_second_start_takes_under_two_seconds_and_imports_no_torch(cache: Path, tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path / "tokenizer")
    size = len(json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"])
    path = tiny_gguf.write_gguf(tmp_path / "a.gguf", tiny_gguf.tiny_model("llama", size), tmp_path / "tokenizer")
    first = prepare_model(locate(path), dtype="fp32").folder
    began = time.monotonic()
    process = prepare_elsewhere(path, "fp32")
    output, errors = process.communicate(timeout=60)
    elapsed = time.monotonic() - began
    assert process.returncode == 0, errors
    folder, figures = output.splitlines()
    seconds, *imported = figures.split()
    assert Path(folder) == first and imported == ["False", "False"]
    assert float(seconds) < 2.0, f"{seconds} s, and {elapsed} s with the start of Python"


def test_the_same_bytes_elsewhere_are_not_converted_again(tiny_llama: Path, tmp_path: Path, cache: Path) -> None:
    import shutil

    first = prepare_model(locate(tiny_llama), dtype="bf16").folder
    before = (first / "model.safetensors").stat().st_mtime_ns
    shutil.copytree(tiny_llama, tmp_path / "elsewhere")
    again = prepare_model(locate(tmp_path / "elsewhere"), dtype="bf16").folder
    assert again == first and (again / "model.safetensors").stat().st_mtime_ns == before


def test_two_processes_at_once_make_one_copy(tiny_llama: Path, cache: Path) -> None:
    processes = [prepare_elsewhere(tiny_llama, "bf16") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len({output.splitlines()[0] for output, _ in outputs}) == 1
    (folder,) = [path for path in (cache / "models").iterdir() if path.is_dir()]
    assert number_formats(folder) == {"BF16"}


def test_a_killed_conversion_leaves_nothing_that_counts(tiny_llama: Path, cache: Path) -> None:
    """kill -9 at many moments; whatever is there afterwards is whole, and the next start clears the rest away."""
    for pause in (0.0, 0.005, 0.02, 0.05):
        process = prepare_elsewhere(tiny_llama, "bf16")
        deadline = time.monotonic() + 60
        while not list(cache.glob("models/.*.tmp")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(pause)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        for folder in (path for path in (cache / "models").iterdir() if path.is_dir() and not path.name.startswith(".")):
            assert number_formats(folder) == {"BF16"}
            return
    made = prepare_model(locate(tiny_llama), dtype="bf16").folder
    assert number_formats(made) == {"BF16"} and not list(cache.glob("models/.*.tmp"))


def test_a_copy_that_somebody_damaged_is_made_again(tiny_llama: Path, cache: Path) -> None:
    made = prepare_model(locate(tiny_llama), dtype="bf16").folder
    raw = (made / "model.safetensors").read_bytes()
    (made / "model.safetensors").write_bytes(raw[:-100])
    assert prepare_model(locate(tiny_llama), dtype="bf16").folder == made
    assert (made / "model.safetensors").read_bytes() == raw
    (made / "config.json").unlink()
    prepare_model(locate(tiny_llama), dtype="bf16")
    assert (made / "config.json").is_file()


def test_a_full_disk_is_one_clear_error_and_leaves_nothing_behind(tiny_llama: Path, cache: Path) -> None:
    """The kernel refuses to let the weights' file grow, as a full disk or a quota does."""
    code = (
        "import resource, signal, sys\n"
        "from fleetune.models.locate import locate\n"
        "from fleetune.models.weights import prepare_model\n"
        "from fleetune.spec.errors import UserError\n"
        "found = locate(sys.argv[1]); found.fingerprint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: prepare_model(found, dtype='bf16')\n"
        "except UserError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_llama)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "could not be converted" in done.stdout and "FLEETUNE_CACHE" in done.stdout
    assert [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLEETUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set FLEETUNE_CACHE"):
        prepare_model(locate(tiny_llama), dtype="bf16")
    assert prepare_model(locate(tiny_llama), dtype="fp32").folder == tiny_llama


def test_the_cache_is_private_to_its_owner(cache: Path) -> None:
    folder = cache_folder("models")
    for path in (cache, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_code_is_left_out_of_a_copy_unless_it_is_allowed(tmp_path: Path, cache: Path) -> None:
    folder = tiny.write_model(tmp_path / "m", "llama")
    (folder / "modeling_x.py").write_text("raise SystemExit")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "modeling_x.X"}, "_attn_implementation_internal": "a/b"}
    (folder / "config.json").write_text(json.dumps(config))
    plain = prepare_model(locate(folder), dtype="bf16").folder
    assert not list(plain.glob("*.py"))
    kept = json.loads((plain / "config.json").read_text())
    assert "auto_map" not in kept and "_attn_implementation_internal" not in kept and kept["model_type"] == "llama"
    trusted = prepare_model(locate(folder), dtype="bf16", allow_remote_code=True).folder
    assert trusted != plain and (trusted / "modeling_x.py").is_file()
    assert "auto_map" in json.loads((trusted / "config.json").read_text())


def test_an_adapter_with_a_lying_header_is_refused(tiny_llama: Path, tmp_path: Path, cache: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_llama)}))
    (adapter / "adapter_model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match="header claims"):
        prepare_model(locate(adapter), dtype="fp32")


def test_two_adapters_of_one_base_share_its_copy(tiny_llama: Path, tmp_path: Path, cache: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    folders = set()
    for number in range(2):
        adapter = tmp_path / f"adapter{number}"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_llama)}))
        save_file({"a": np.full(2, number, dtype=np.float32)}, adapter / "adapter_model.safetensors")
        prepared = prepare_model(locate(adapter), dtype="bf16")
        assert prepared.adapter == adapter
        folders.add((prepared.folder, prepared.fingerprint))
    assert len({folder for folder, _ in folders}) == 1 and len({fingerprint for _, fingerprint in folders}) == 2


def test_memory_holds_one_tensor_and_not_the_model(tmp_path: Path, cache: Path) -> None:
    """A model of 320 MB in 40 tensors is converted with less than a third of it in anonymous memory."""
    import torch
    from safetensors.torch import save_file

    folder = tiny.write_model(tmp_path / "m", "llama")
    blocks = {f"block{number}": torch.zeros(1 << 20, 2) for number in range(40)}
    save_file(blocks, folder / "model.safetensors", metadata={"format": "pt"})
    code = (
        "import sys, torch, threading, time\n"
        "from fleetune.models.locate import locate\nfrom fleetune.models.weights import prepare_model\n"
        "def anonymous():\n"
        "    return next(int(line.split()[1]) << 10 for line in open('/proc/self/status') if line.startswith('RssAnon'))\n"
        "found = locate(sys.argv[1]); found.fingerprint\n"
        "before, peak, done = anonymous(), [0], threading.Event()\n"
        "def look():\n"
        "    while not done.wait(0.002): peak[0] = max(peak[0], anonymous())\n"
        "thread = threading.Thread(target=look); thread.start()\n"
        "prepare_model(found, dtype='bf16'); done.set(); thread.join()\n"
        "print(peak[0] - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 << 20, f"{int(done.stdout) >> 20} MiB"
