"""Tiny random models of real architectures, with a real tokenizer and chat template, written as ordinary folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: family -> overrides of its config; every family of the anatomy test.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 96, "num_key_value_heads": 2},
    "mistral": {"intermediate_size": 96, "num_key_value_heads": 2, "sliding_window": None},
    "mixtral": {"intermediate_size": 96, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {"intermediate_size": 96},
    "falcon": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "gptj": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    "gpt_oss": {
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 12,
        "layer_types": ["full_attention", "full_attention"],
    },
    "phi": {"intermediate_size": 96},
    "gemma": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12},
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789 +-*/=()<>",
    "How many clips did Natalia sell altogether in April and May? She sold half as many clips in May.",
    '{"action": "set", "device": "lamp", "value": 70} Turn the kitchen lamp to seventy percent, please.',
] * 4


def write_tokenizer(folder: Path, vocab_size: int = 400) -> int:
    """Train a byte-level BPE tokenizer with ChatML specials into `folder`; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return len(fast)


def write_model(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of `family` (2 layers, hidden size 48, fp32) with tokenizer into `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family in ("gpt2", "gptj"):
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            sizes.pop(name)
    config = AutoConfig.for_model(family, **{**sizes, **FAMILIES.get(family, {}), **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(folder)
    return folder
