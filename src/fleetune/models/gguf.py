"""A GGUF file becomes an ordinary model folder: config, tokenizer, safetensors in the asked number format.

Shape and tokenizer are translated by transformers (from a copy of the header without the vocabulary where that is enough,
which saves seconds). The weights of the plain families are read one tensor at a time with the gguf package's own tables
of names and formats; what llama.cpp stores differently is turned back here. Other families go through transformers' own
GGUF loader, which holds the whole model in memory.

Checked by tests: same logits as transformers' own loading, for every family in `_PLAIN`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fleetune.models.gguf_file import GgufFile, import_gguf
from fleetune.models.gguf_tokenizer import write_tokenizer
from fleetune.models.weight_writer import PRECISIONS, Planned, write_weights
from fleetune.spec.errors import UserError
from fleetune.spec.safetensors_header import SINGLE_FILE

_Turn = Callable[[str, np.ndarray, Any], np.ndarray]
#: Tensors that are no weights: tables of rotary factors, which belong into the config.
_ROTARY_FACTORS = "rope_freqs.weight"
_log = logging.getLogger(__name__)


def convert_gguf(path: Path, folder: Path, *, dtype: str) -> None:
    """Write the model of a GGUF file into the existing, empty `folder`. dtype: fp32, bf16 or fp16."""
    file = GgufFile.read(path)
    config = read_gguf_config(file, folder)
    config.dtype = PRECISIONS[dtype][0]
    turn = _PLAIN.get(file.architecture)
    if turn is None or file.number("expert_count"):
        _convert_by_transformers(file, config, folder, dtype=dtype)
    else:
        _convert_plain(file, config, folder, dtype=dtype, turn=turn)
    config.save_pretrained(folder)
    _write_generation_config(config, folder)
    write_tokenizer(file, folder, context_length=getattr(config, "max_position_embeddings", None))


def read_gguf_config(file: GgufFile, scratch: Path) -> Any:
    """The transformers config that a GGUF describes. `scratch`: a folder for a temporary file."""
    from transformers import AutoConfig

    skeleton = scratch / "skeleton.gguf"
    skeleton.write_bytes(file.skeleton())
    try:
        config = AutoConfig.from_pretrained(scratch, gguf_file=skeleton.name, local_files_only=True)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UserError(_unknown(file)) from error
    finally:
        skeleton.unlink()
    values = {key: _shortest(value) for key, value in config.to_dict().items() if not key.startswith("_")}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    values.update(_sizes(file, values))
    values.update(_rotary(file, values))
    made = type(config).from_dict(values)
    made.architectures = [_model_class(made).__name__]
    return made


def _convert_plain(file: GgufFile, config: Any, folder: Path, *, dtype: str, turn: _Turn) -> None:
    """One tensor at a time. Raises UserError unless every tensor has its place and every place its tensor."""
    model = _empty_model(config)
    state = model.state_dict()
    names = _names(file, state, model)
    unused = sorted(set(file.tensors) - set(names.values()) - {_ROTARY_FACTORS})
    misshaped = [
        f"{source} is {file.tensors[source].shape} for {name} {tuple(state[name].shape)}"
        for name, source in names.items()
        if file.tensors[source].shape != tuple(state[name].shape)
    ]
    if unused or misshaped:
        raise UserError(
            f"{file.path} is not the {file.architecture} model that it says ({'; '.join((misshaped or unused)[:3])}): "
            "give the original model folder"
        )
    planned = [Planned(name, PRECISIONS[dtype][0], tuple(state[name].shape)) for name in names]

    def read(name: str) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(turn(names[name], file.values(names[name]), config)))

    write_weights(folder / SINGLE_FILE, planned, read)


def _names(file: GgufFile, state: dict[str, Any], model: Any) -> dict[str, str]:
    """Name in the model -> name in the file. What is tied to another weight is left out."""
    gguf = import_gguf()
    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    table = gguf.get_tensor_name_map(architecture, int(file.number("block_count")))
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    names, missing = {}, []
    for name in state:
        source = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if name in tied and source not in file.tensors:
            continue
        if source in file.tensors:
            names[name] = source
        else:
            missing.append(name)
    if missing:
        raise UserError(
            f"{file.path} lacks {', '.join(missing[:3])} of a {file.architecture} model: give the original model folder"
        )
    return names


def _convert_by_transformers(file: GgufFile, config: Any, folder: Path, *, dtype: str) -> None:
    import torch

    _log.info("%s: a %s model, read by transformers as a whole", file.path, file.architecture)
    try:
        model = _model_class(config).from_pretrained(
            file.path.parent, gguf_file=file.path.name, dtype=getattr(torch, PRECISIONS[dtype][0]), local_files_only=True
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UserError(_unknown(file)) from error
    state = model.state_dict()
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    kept = {name: tensor for name, tensor in state.items() if name not in tied}
    if any(not tensor.is_floating_point() for tensor in kept.values()):
        raise UserError(_unknown(file))
    planned = [Planned(name, PRECISIONS[dtype][0], tuple(tensor.shape)) for name, tensor in kept.items()]
    write_weights(folder / SINGLE_FILE, planned, kept.__getitem__)


def _as_it_is(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    return values


def _llama(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """llama.cpp rotates neighbouring pairs (0, 1), (2, 3), ...; transformers the two halves of a head.

    So a head's rows of q and k lie interleaved in the file: row 2i + h there is row h · head_dim / 2 + i here.
    """
    if not name.endswith(("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")):
        return values
    heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _norms_from_one(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Gemma multiplies by 1 + weight; llama.cpp stores the sum."""
    return values - np.float32(1) if name.endswith("norm.weight") else values


#: Families whose tensors have one place each in transformers: architecture -> what turns a tensor back.
_PLAIN: dict[str, _Turn] = {
    "llama": _llama,
    "qwen2": _as_it_is,
    "qwen3": _as_it_is,
    "phi3": _as_it_is,
    "starcoder2": _as_it_is,
    "gemma2": _norms_from_one,
    "gemma3": _norms_from_one,
}


def _sizes(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    """What transformers' translation of the shape leaves out. Raises UserError where a GGUF does not hold all of it."""
    found: dict[str, Any] = {}
    width = file.number("attention.key_length") or values.get("head_dim")
    if width and "head_dim" in values:
        found["head_dim"] = width
    rotated = file.number("rope.dimension_count")
    if rotated and rotated != (width or values["hidden_size"] // values["num_attention_heads"]):
        raise UserError(f"{file.path} rotates {rotated} of {width} dims of a head: give the original model folder")
    window = file.number("attention.sliding_window")
    if window and "sliding_window" in values:
        found["sliding_window"] = window
    if file.architecture in _SCALED_BY_WIDTH and file.number("block_count") == _SCALED_BY_WIDTH[file.architecture]:
        found["query_pre_attn_scalar"] = values["hidden_size"] // values["num_attention_heads"]
    return found


#: Of these two families one size scales attention by the width per head and not by the head's own; its number of blocks
#: tells which (Gemma 2 and 3 technical reports: the 27B models). The file does not say it.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}


def _rotary(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    """What the config must say of the rotary embedding beyond its base. Raises UserError where it cannot say it.

    transformers' own translation leaves all of this out, so that a long-context model would be silently another one.
    """
    kind = file.number("rope.scaling.type")
    if _ROTARY_FACTORS in file.tensors:
        return {"rope_parameters": _llama3_rotary(file, values)}
    longrope = sorted(name for name in file.tensors if name.startswith("rope_factors_"))
    if kind in (None, "none") and not longrope:
        return {}
    factor = file.number("rope.scaling.factor")
    rope = values.get("rope_parameters") or {}
    if kind == "linear" and factor and "rope_theta" in rope and not longrope:  # else it differs from layer to layer
        return {"rope_parameters": {**rope, "rope_type": "linear", "factor": float(factor)}}
    raise UserError(
        f"{file.path} scales its rotary embedding ({kind or longrope[0]}), which cannot be read from a GGUF exactly: give the "
        "original model folder"
    )


def _llama3_rotary(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1 and later: the file holds the factor of every frequency; the config needs the four numbers behind them.

    Meta's rule (Llama 3.1): wavelengths below 8192 / 4 stay, above 8192 / 1 are stretched by the factor, between them it
    goes smoothly. The largest factor in the file is that factor; the rule then has to give the whole table.
    """
    stored = file.values(_ROTARY_FACTORS).reshape(-1).astype(np.float64)
    rope = {**(values.get("rope_parameters") or {}), "rope_type": "llama3"}
    base = float(rope.get("rope_theta") or file.number("rope.freq_base") or 1e4)
    low, high, original, factor = 1.0, 4.0, 8192, float(stored.max())
    wavelengths = 2 * math.pi * base ** (np.arange(stored.size) / stored.size)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=1e-3):
        raise UserError(f"{file.path} has a table of rotary factors that is not Llama 3's: give the original model folder")
    return {
        **rope,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write_generation_config(config: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    specials = {f"{name}_token_id": getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    GenerationConfig(**specials).save_pretrained(folder)


def _empty_model(config: Any) -> Any:
    import torch

    with torch.device("meta"):
        return _model_class(config)(config)


def _model_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UserError(
            f"a {config.model_type} model is no causal language model: give a decoder-only language model"
        ) from None


def _shortest(value: Any) -> Any:
    """A number that was stored in 32 bits, as people write it: 1e-05 and not 9.999999747378752e-06."""
    if isinstance(value, float) and math.isfinite(value) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    if isinstance(value, dict):
        return {key: _shortest(inner) for key, inner in value.items()}
    return value


def _unknown(file: GgufFile) -> str:
    import transformers

    return (
        f"{file.path} is a {file.architecture!r} model, and transformers {transformers.__version__} cannot read that from a "
        "GGUF: give the original model folder or hub id"
    )
