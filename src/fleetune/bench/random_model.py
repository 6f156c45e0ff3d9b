"""A model of random weights and about so many parameters, with another model's tokenizer: for measuring, not for use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fleetune.models.locate import locate
from fleetune.models.weight_files import companion_files
from fleetune.models.weight_writer import Planned, write_weights
from fleetune.models.weights import prepare_model

_HEAD = 64


def write_random_model(like: str, num_parameters: int, folder: Path) -> Path:
    """A llama of about `num_parameters`, stored in bf16, with the tokenizer of the model `like`. Returns its folder.

    Its shape is that of models people use: four times as wide in the middle, four query heads on each head of keys. Raises
    UserError where `like` cannot be found.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    source = prepare_model(locate(like), dtype="bf16").folder
    folder.mkdir(parents=True)
    for path in companion_files(source):
        shutil.copyfile(path, folder / path.name)
    given = json.loads((source / "config.json").read_text(encoding="utf-8"))
    vocab_size = int(given["vocab_size"])
    hidden, layers = _shape(num_parameters, vocab_size)
    special = {name: given.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // _HEAD,
        num_key_value_heads=hidden // _HEAD // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        **special,
    )
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in AutoModelForCausalLM.from_config(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def random(name: str) -> torch.Tensor:
        shape = shapes[name]
        return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02

    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    planned = [Planned(name, "bfloat16", shape) for name, shape in shapes.items()]
    write_weights(folder / "model.safetensors", planned, random)
    return folder


def _shape(num_parameters: int, vocab_size: int) -> tuple[int, int]:
    """(hidden size, layers): about 128 times as wide as deep, as models of this size are, and then as deep as is asked."""

    def in_layer(hidden: int) -> int:
        return hidden * hidden * 29 // 2  # q and o: 1 each; k and v: 1/4 each; three of 4 x hidden: 12

    widths = range(256, 16384, 256)
    hidden = min(widths, key=lambda width: abs(width // 128 * in_layer(width) + vocab_size * width - num_parameters))
    return hidden, max(2, round((num_parameters - vocab_size * hidden) / in_layer(hidden)))
