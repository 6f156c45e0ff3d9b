"""GGUF's names of tensors, as the names that transformers gives the same tensors."""

from __future__ import annotations

import re

from fleetune.spec.gguf_header import GgufHeader
from fleetune.spec.stored_tensor import StoredTensor

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
#: Families whose names differ from Llama's.
_OTHERS = {
    "phi3": {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
_LIKE_LLAMA = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral", "mistral3", "smollm3")


def model_names(header: GgufHeader) -> tuple[dict[str, StoredTensor], bool]:
    """(tensors by their names in transformers, whether the family's names are known)."""
    table = _OTHERS.get(header.architecture, _LLAMA)
    known = header.architecture in _LIKE_LLAMA or header.architecture in _OTHERS
    return {_model_name(name, table): tensor for name, tensor in header.tensors.items()}, known


def _model_name(name: str, table: dict[str, str]) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match:
        return f"model.layers.{match[1]}.{table.get(match[2], match[2])}.{match[3]}"
    path, _, leaf = name.rpartition(".")
    return f"{_OUTSIDE[path]}.{leaf}" if path in _OUTSIDE else name
