"""A tiny random model written as a GGUF file, the way llama.cpp's converter lays it out: the inverse of what we read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

#: family of transformers -> (architecture of llama.cpp, config that differs from the tiny defaults).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "phi3": ("phi3", {"num_key_value_heads": 2}),
    "starcoder2": ("starcoder2", {"num_key_value_heads": 2}),
    "gemma2": ("gemma2", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma3_text": ("gemma3", {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
}


def tiny_model(family: str, vocab_size: int, **overrides: Any) -> Any:
    """A random fp32 model of 2 layers, hidden size 64 (quantised formats need multiples of 32)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": vocab_size, "hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if family != "bloom":
        sizes |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES[family][1], **overrides})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():  # norms that are not all 1 show whether they were read
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def write_gguf(
    path: Path, model: Any, tokenizer_folder: Path, *, pre: str | None = "smollm", quantize: str = "F32", **extra: Any
) -> Path:
    """Write `model` with the byte-level tokenizer of a folder. extra: more float or string keys, `a__b` for `a.b`."""
    import gguf

    config = model.config
    architecture = FAMILIES[config.model_type][0]
    writer = gguf.GGUFWriter(path, architecture)
    _write_shape(writer, config)
    _write_tokenizer(writer, tokenizer_folder, pre)
    for key, value in extra.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, np.ndarray):
            writer.add_tensor(key.replace("__", "."), value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_float32(name, value)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        names = (name, name.removeprefix("transformer."))
        stored = next(filter(None, (table.get_name(each, try_suffixes=(".weight", ".bias")) for each in names)), None)
        if stored is None:
            raise ValueError(f"llama.cpp has no place for {name}")
        values = _laid_out(stored, tensor.numpy(), config)
        if quantize != "F32" and values.ndim == 2 and values.shape[-1] % 32 == 0:
            kind_of = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(stored, gguf.quants.quantize(values, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _laid_out(stored: str, values: np.ndarray, config: Any) -> np.ndarray:
    if config.model_type == "llama" and ("attn_q" in stored or "attn_k" in stored):
        heads = config.num_attention_heads if "attn_q" in stored else config.num_key_value_heads
        half = values.shape[0] // heads // 2
        return values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if config.model_type.startswith("gemma") and stored.endswith("norm.weight"):
        return values + np.float32(1)
    if config.model_type == "bloom" and "attn_qkv" in stored:
        size = config.hidden_size // config.n_head
        parts = values.reshape(config.n_head, 3, size, *values.shape[1:])
        return np.concatenate([parts[:, index].reshape(-1, *values.shape[1:]) for index in range(3)])
    return values


def _write_shape(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_name("tiny")
    if config.model_type == "bloom":
        writer.add_context_length(256)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    rope = rope.get("sliding_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    if config.model_type in ("qwen3", "gemma2", "gemma3_text"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _write_tokenizer(writer: Any, folder: Path, pre: str | None) -> None:
    from gguf import TokenType

    backend = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = backend["model"]["vocab"]
    specials = {token["content"] for token in backend["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in specials else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}")
