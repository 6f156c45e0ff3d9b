"""The shape of a model, from its files' headers as bytes: without torch, without transformers, without reading a weight."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fleetune.spec.errors import UserError
from fleetune.spec.gguf_header import GgufHeader, is_gguf, read_gguf
from fleetune.spec.gguf_names import model_names
from fleetune.spec.safetensors_header import read_model_tensors
from fleetune.spec.stored_tensor import FLOAT_BYTES, StoredTensor

MAX_CONFIG_BYTES = 16 << 20

#: A block's tensor: (path of the list of blocks, number, name within the block).
_IN_BLOCK = re.compile(r"((?:[^.]+\.)*?)(\d+)\.(.+)")
#: Buffers that older files store beside the parameters: masks of attention, rotary frequencies.
_BUFFERS = re.compile(
    r"(\.attn\.bias|\.attention\.bias|masked_bias|inv_freq|position_ids|rope_freqs\.weight|rope_factors_\w+\.weight)$"
)
#: Modules that choose experts: parameters of their own kind, no linear layers.
_ROUTERS = ("router", "gate")


@dataclass(frozen=True)
class LinearShape:
    """One linear layer of a block. name: within the block, as `self_attn.q_proj`."""

    block: int
    name: str
    num_in: int
    num_out: int


@dataclass(frozen=True)
class ModelShape:
    """What a causal language model is made of.

    num_kv_heads: heads of keys and values. max_positions: longest sequence it was made for, where it says so;
    has_position_table: it learned an embedding of each position and has none beyond. tied: the head is the embedding.
    tensors: by name; a GGUF's names are those that transformers gives them. names_known: False where that table has none
    for a GGUF's family, so that names of modules say nothing.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    has_position_table: bool
    tied: bool
    tensors: Mapping[str, StoredTensor]
    names_known: bool = True

    @cached_property
    def parameters(self) -> dict[str, StoredTensor]:
        """The tensors that are parameters: no stored buffers, and a tied head only once."""
        heads = _embeddings(self.tensors, self.vocab_size, self.hidden_size)[1:] if self.tied else []
        return {name: tensor for name, tensor in self.tensors.items() if name not in heads and not _is_buffer(name, tensor)}

    @cached_property
    def num_parameters(self) -> int:
        return sum(tensor.num_values for tensor in self.parameters.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of the blocks' experts."""
        in_blocks = _in_blocks(self.tensors, self.num_layers)
        return sum(self.tensors[name].num_values for _, inner, name in in_blocks if _is_expert(inner))

    @cached_property
    def blocks(self) -> dict[str, int]:
        """Number of the block that each tensor of a block lies in."""
        return {name: block for block, _, name in _in_blocks(self.tensors, self.num_layers)}

    @cached_property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the token embedding and, where it is stored on its own, of the head."""
        return tuple(_embeddings(self.tensors, self.vocab_size, self.hidden_size))

    @cached_property
    def linears(self) -> tuple[LinearShape, ...]:
        """The linear layers of the blocks, in the order of the files. Experts and what chooses them are none."""
        in_blocks = _in_blocks(self.tensors, self.num_layers)
        with_experts = {block for block, inner, _ in in_blocks if _is_expert(inner)}
        found = []
        for block, inner, name in in_blocks:
            shape = self.tensors[name].shape
            if len(shape) == 2 and inner.endswith(".weight") and not _is_other(inner, block in with_experts):
                num_out, num_in = shape
                bias = self.tensors.get(f"{name.removesuffix('weight')}bias")
                if bias is not None and bias.shape == (num_in,) and num_in != num_out:
                    num_out, num_in = num_in, num_out  # GPT-2's Conv1D keeps [in, out]; its bias shows which is which
                found.append(LinearShape(block, inner.removesuffix(".weight"), num_in, num_out))
        return tuple(found)


def read_shape(path: Path) -> ModelShape:
    """The shape of a model folder or a .gguf file. Raises UserError: no such model, damaged, quantised by another tool."""
    if path.is_file() and is_gguf(path):
        return _of_gguf(path, read_gguf(path))
    if not path.is_dir():
        raise UserError(f"{path} is neither a model folder nor a .gguf file: give one of them")
    return _of_folder(path)


def _of_folder(folder: Path) -> ModelShape:
    config = _read_config(folder / "config.json")
    tensors = read_model_tensors(folder)
    if not any(tensor.dtype in FLOAT_BYTES for tensor in tensors.values()):
        raise UserError(f"{folder} holds no weights that are numbers: download the model again")
    where = folder / "config.json"
    hidden = _number(config, ("hidden_size", "n_embd", "d_model", "dim"), where, "the hidden size")
    heads = _number(config, ("num_attention_heads", "n_head", "n_heads", "num_heads"), where, "the number of heads", least=0)
    vocab = _number(config, ("vocab_size",), where, "the size of the vocabulary")
    layers = _number(config, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), where, "the number of layers")
    head_dim = _optional(config, ("head_dim",)) or (hidden // heads if heads else 0)
    embeddings = _embeddings(tensors, vocab, hidden)
    positions = _optional(config, ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"))
    return ModelShape(
        model_type=str(config.get("model_type", "")),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(tensors, config, heads, head_dim),
        head_dim=head_dim,
        intermediate_size=_optional(config, ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff"))
        or 4 * hidden,
        vocab_size=vocab,
        max_positions=positions,
        has_position_table=_has_position_table(tensors, positions, hidden),
        tied=len(embeddings) == 1 or config.get("tie_word_embeddings") is True,
        tensors=tensors,
    )


def _of_gguf(path: Path, header: GgufHeader) -> ModelShape:
    tensors, names_known = model_names(header)
    embedding = header.tensors.get("token_embd.weight")
    wanted = {name: header.of_model(name) for name in ("embedding_length", "block_count", "attention.head_count")}
    missing = [name for name, value in wanted.items() if type(value) is not int or value < 1]
    if missing or embedding is None or len(embedding.shape) != 2:
        raise UserError(
            f"{path} does not say its {missing[0] if missing else 'token embedding'}: give another GGUF of the model"
        )
    hidden, layers, heads = wanted.values()
    head_dim = header.of_model("attention.key_length") or hidden // heads
    return ModelShape(
        model_type=header.architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=header.of_model("attention.head_count_kv") or heads,
        head_dim=head_dim,
        intermediate_size=header.of_model("feed_forward_length") or 4 * hidden,
        vocab_size=embedding.shape[0],
        max_positions=header.of_model("context_length"),
        has_position_table="position_embd.weight" in header.tensors,
        tied="output.weight" not in header.tensors,
        tensors=tensors,
        names_known=names_known,
    )


def _read_config(path: Path) -> dict[str, Any]:
    """The values of a config.json, those of a nested text model on top. They are only looked at, never acted upon."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(f"{path} has more than {MAX_CONFIG_BYTES:,} bytes: do not use this model")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give a folder that holds a whole model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): download the model again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object: download the model again")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _number(config: Mapping[str, Any], names: tuple[str, ...], where: Path, what: str, *, least: int = 1) -> int:
    value = _optional(config, names)
    if value is None or value < least:
        raise UserError(f"{where} does not say {what} ({' or '.join(names)}): give a causal language model of transformers")
    return value


def _optional(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    values = [config[name] for name in names if type(config.get(name)) is int and 0 <= config[name] < 1 << 40]
    return values[0] if values else None


def _is_buffer(name: str, tensor: StoredTensor) -> bool:
    """Masks stand in four dims where a bias has one."""
    if tensor.dtype in ("BOOL", "U8", "I64", "I32"):
        return True
    return bool(_BUFFERS.search(name)) and not (name.endswith(".bias") and len(tensor.shape) == 1)


def _in_blocks(tensors: Mapping[str, StoredTensor], num_layers: int) -> list[tuple[int, str, str]]:
    """(block, name within it, whole name) of the blocks' tensors.

    The blocks are the outermost list with as many numbered entries as the model has layers; the largest if several.
    """
    lists: dict[str, list[tuple[int, str, str]]] = {}
    for name in tensors:
        if match := _IN_BLOCK.fullmatch(name):
            lists.setdefault(match[1], []).append((int(match[2]), match[3], name))
    fitting = [found for found in lists.values() if len({block for block, _, _ in found}) == num_layers]
    return max(
        fitting or list(lists.values()), key=lambda found: sum(tensors[name].num_values for _, _, name in found), default=[]
    )


def _embeddings(tensors: Mapping[str, StoredTensor], vocab_size: int, hidden_size: int) -> list[str]:
    """Names of the token embedding and, where it is stored on its own, the head: [vocabulary, hidden] outside the blocks."""
    names = [
        name
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2
        and tensor.shape[1] == hidden_size
        and tensor.shape[0] >= vocab_size
        and not _IN_BLOCK.fullmatch(name)
        and not _is_position(name)
    ]
    return sorted(names, key=lambda name: not re.search(r"emb|wte|tok", name))


def _is_position(name: str) -> bool:
    return bool(re.search(r"wpe|position", name))


def _has_position_table(tensors: Mapping[str, StoredTensor], positions: int | None, hidden: int) -> bool:
    return any(
        _is_position(name) and len(tensor.shape) == 2 and tensor.shape[0] >= (positions or 1) and tensor.shape[1] == hidden
        for name, tensor in tensors.items()
    )


def _kv_heads(tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], heads: int, head_dim: int) -> int:
    """From the shapes where they tell, since configs of some families say something else (Falcon's multi_query)."""
    for name, tensor in tensors.items():
        if head_dim and len(tensor.shape) == 2:
            if name.endswith(".k_proj.weight"):
                return tensor.shape[0] // head_dim
            if name.endswith(".query_key_value.weight"):
                return (tensor.shape[0] // head_dim - heads) // 2
    return _optional(config, ("num_key_value_heads", "num_kv_heads", "n_head_kv")) or heads


def _is_expert(inner: str) -> bool:
    return bool(re.search(r"(^|\.)experts\.|_exps\.", inner))


def _is_other(inner: str, has_experts: bool) -> bool:
    """Whether a matrix within a block is no linear layer: an expert, what chooses experts, a norm, an embedding."""
    leaf = inner.removesuffix(".weight").rpartition(".")[2]
    return _is_expert(inner) or (leaf in _ROUTERS and has_experts) or "norm" in leaf or "embed" in leaf
