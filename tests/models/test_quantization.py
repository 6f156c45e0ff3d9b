"""Quantised bases: the bytes are right, they never change, and what trains on them is what PEFT and transformers train."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
from fleetune.models.adapters import add_adapter, load_adapter
from fleetune.models.build import load_model
from fleetune.models.causal import CausalModel
from fleetune.models.lora import LoraLinear
from fleetune.models.merge import merged_tensors
from fleetune.models.objective import TokenLoss
from fleetune.models.quantization import dequantize, quantize
from fleetune.models.quantized_files import QuantisedUnder, QuantizedWeights, prepare_quantized
from fleetune.models.quantized_linear import QuantizedLinear, quantized_layers
from fleetune.planning.memory import quantised, rank_memory
from fleetune.spec.errors import UserError
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import read_shape
from fleetune.spec.quantized import SCHEMES, is_quantizable, quantized_bytes
from micro_batches import random_batch
from models.awake import awake

CPU = torch.device("cpu")
#: Rows of whole blocks and not, fewer weights than a block, and a number of blocks that needs a second nested scale.
SHAPES = [(48, 48), (96, 48), (64, 192), (3, 10), (1, 64), (33, 130), (7, 6), (96, 200), (257, 128)]
#: The levels of NF4, from the appendix of the paper, around 0.
LOWER = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500)
UPPER = (0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)
TOKENS = torch.tensor([[5, 9, 17, 40, 2, 8, 33, 120]])


def quantized(folder: Path, scheme: str, *, dtype: str = "fp32") -> Path:
    return prepare_quantized(folder, scheme=scheme, fingerprint=folder.name.ljust(32, "-"), dtype=dtype)


def adapted(folder: Path, scheme: str, kind: str = "lora", *, dtype: str = "fp32", dropout: float = 0.0) -> CausalModel:
    """A quantised model with an adapter whose second factors are not zero, in training mode."""
    model = load_model(folder, dtype=dtype, device=CPU, trainable=False, quantized=quantized(folder, scheme, dtype=dtype))
    add_adapter(model, adapter=kind, rank=4, alpha=6, dropout=dropout, targets=(), seed=3)
    return awake(model)


def base_bytes(model: CausalModel) -> dict[str, bytes]:
    parts = {f"{n}.{k}": t for n, layer in quantized_layers(model.module).items() for k, t in layer.parts().items()}
    frozen = {n: p for n, p in model.module.named_parameters() if not p.requires_grad}
    return {
        name: value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, value in {**parts, **frozen}.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_what_the_paper_says_for_every_shape(shape, dtype):
    """Against the definition, written out: 16 levels, a scale for 64 weights, scales in 8 bits with one for 256 of them."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parts = quantize(weight, "nf4")
    assert sum(part.numel() * part.element_size() for part in parts.values()) == quantized_bytes("nf4", *shape)
    levels = torch.tensor([*LOWER, 0.0, *UPPER])
    packed = parts["codes"].reshape(-1).int()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)
    from bitsandbytes.functional import create_dynamic_map

    nested = parts["nested_scales"].repeat_interleave(256)[: parts["scales"].numel()]
    scales = create_dynamic_map()[parts["scales"].int()] * nested + parts["offset"]
    wanted = (levels[codes.long()] * scales.repeat_interleave(64)[: codes.numel()]).reshape(shape)
    made = dequantize(parts, shape, "nf4", dtype)
    assert made.dtype == dtype and torch.allclose(made.float(), wanted, rtol=1e-2 if dtype != torch.float32 else 1e-5)
    largest = weight.reshape(-1).abs().max()
    assert (dequantize(parts, shape, "nf4", torch.float32) - weight).abs().max() < 0.2 * largest


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_keeps_each_row_to_half_a_step(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    parts = quantize(weight, "int8")
    assert sum(part.numel() * part.element_size() for part in parts.values()) == quantized_bytes("int8", *shape)
    made = dequantize(parts, shape, "int8", torch.float32)
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((made - weight).abs() <= 0.51 * step + 1e-3 * weight.abs()).all()
    assert torch.equal(dequantize(parts, shape, "int8", torch.bfloat16), made.bfloat16())


def test_a_weight_that_int8_cannot_hold_is_refused():
    with pytest.raises(UserError, match=r"65504: use nf4"):
        quantize(torch.full((2, 64), 1e5), "int8")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_planned_bytes_are_the_bytes_held_for_every_family(any_model, scheme, model_folder):
    folder = model_folder(any_model)
    model = load_model(folder, dtype="fp32", device=CPU, trainable=False, quantized=quantized(folder, scheme))
    plain = load_model(folder, dtype="fp32", device=CPU, trainable=False)
    assert model.anatomy == plain.anatomy and model.traits == plain.traits
    shape = read_shape(folder)
    held = model.held_bytes()
    assert held + model.saved_bytes() == plain.held_bytes() > held
    if model.anatomy.bypassed:  # weights that a fused kernel reads past the layer rest as they are; a plan cannot know
        return
    everything = [(tensor.shape, False) for tensor in shape.parameters.values()]
    resting = quantised(shape.linears, scheme)
    planned = rank_memory(everything, [], precision="fp32", layout=Layout(), resting=resting)
    assert planned.frozen_bytes == held
    assert planned.quantized_parameters == sum(layer.out_features * layer.in_features for layer in layers_of(model))
    assert not any(name in quantized_layers(model.module) for name in (model.anatomy.head, model.anatomy.embedding))


def layers_of(model: CausalModel) -> list[QuantizedLinear]:
    return list(quantized_layers(model.module).values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_those_of_the_dequantised_model_and_the_base_never_changes(any_model, scheme, model_folder):
    check_gradients(model_folder(any_model), scheme, "lora")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["dora", "rslora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_so_are_those_of_the_other_adapters(family, kind, scheme, model_folder):
    check_gradients(model_folder(family), scheme, kind)


def check_gradients(folder: Path, scheme: str, kind: str) -> None:
    """The same products on the same values, whether a weight rests or is made for the moment."""
    model = adapted(folder, scheme, kind)
    before = base_bytes(model)
    reference = load_model(folder, dtype="fp32", device=CPU, trainable=False)
    with torch.no_grad():
        for name, layer in quantized_layers(model.module).items():
            linear = reference.module.get_submodule(name.removesuffix(".quantized"))
            linear.weight = torch.nn.Parameter(
                layer.dense().t().contiguous() if layer.was_conv1d else layer.dense(), requires_grad=False
            )
    add_adapter(reference, adapter=kind, rank=4, alpha=6, dropout=0.0, targets=(), seed=3)
    theirs = dict(reference.trained())
    ours = dict(model.trained())
    assert list(theirs) == list(ours)
    with torch.no_grad():
        for name, parameter in ours.items():
            theirs[name].copy_(parameter)
    batch = random_batch([9, 14, 5])
    losses = []
    for one in (model, reference):
        laid_out = one.lay_out(batch)
        loss, _ = TokenLoss()(one.hidden(laid_out), laid_out, one.head)
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, parameter in ours.items():
        assert torch.allclose(parameter.grad, theirs[name].grad, atol=1e-5 * max(1.0, float(parameter.grad.abs().max()))), name
    optimizer = torch.optim.AdamW([p for _, p in model.trained()], lr=1e-2)
    optimizer.step()
    assert base_bytes(model) == before
    assert any(not torch.equal(parameter, theirs[name]) for name, parameter in ours.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_loss_falls_in_every_precision_and_with_dropout_and_checkpointing(tiny_llama, scheme, precision):
    folder = tiny_llama
    if precision != "fp32":
        from fleetune.models.locate import locate
        from fleetune.models.weights import prepare_model

        folder = prepare_model(locate(tiny_llama), dtype=precision).folder
    losses = {}
    for checkpointing in (False, True):
        model = load_model(
            folder,
            dtype=precision,
            device=CPU,
            trainable=False,
            gradient_checkpointing=checkpointing,
            quantized=quantized(folder, scheme, dtype=precision),
        )
        add_adapter(model, adapter="lora", rank=4, alpha=8, dropout=0.1, targets=("q_proj", "down_proj"), seed=0)
        before = base_bytes(model)
        optimizer = torch.optim.AdamW([p for _, p in model.trained()], lr=2e-2)
        batch, seen = random_batch([12, 12]), []
        for _ in range(8):
            optimizer.zero_grad()
            laid_out = model.lay_out(batch)
            loss, weight = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
            (loss / weight).backward()
            optimizer.step()
            seen.append(float(loss.detach()) / weight)
        losses[checkpointing] = seen
        assert base_bytes(model) == before
    assert losses[False][-1] < losses[False][0] - 0.2
    assert losses[True] == losses[False], "recomputing a block changes no bit"


#: Sizes that transformers' own path can be compared at: the CPU kernel of bitsandbytes 0.50 misreads rows that are no whole
#: number of 64-weight blocks.
WHOLE = {
    "llama": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64},
    "phi": {"hidden_size": 64, "intermediate_size": 128},
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", list(WHOLE))
def test_losses_and_gradients_are_those_of_transformers_and_peft_on_bitsandbytes(family, scheme, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = tiny.write_model(tmp_path / f"{family}-whole", family, **WHOLE[family])
    ours = adapted(folder, scheme)
    layers = {name.removesuffix(".quantized") for name in quantized_layers(ours.module)}
    skipped = [n for n, m in ours.module.named_modules() if isinstance(m, torch.nn.Linear) and n not in layers]
    options = (
        {"load_in_8bit": True, "llm_int8_skip_modules": skipped}
        if scheme == "int8"
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.float32,
            "llm_int8_skip_modules": skipped,
        }
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32, device_map={"": "cpu"}
    )
    ours.save(ours.trained(), tmp_path / "adapter", base_model=str(folder))
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).train()
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = {name for name, module in theirs.named_modules() if type(module).__name__ in ("Linear8bitLt", "Linear4bit")}
    assert len({name for name in found if "base_layer" in name}) == len(layers) > 0, "the same layers are quantised"
    wanted = theirs(input_ids=TOKENS, labels=TOKENS).loss
    wanted.backward()
    for module in ours.module.modules():
        if hasattr(module, "p") and type(module).__name__ == "KeyedDropout":
            module.p = 0.0
    with ours.own_attention() as module:
        loss = module(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=2e-6)
    gradients = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    for name, parameter in ours.trained():
        other = gradients[f"base_model.model.{name}"]
        assert torch.allclose(parameter.grad, other, atol=2e-6 * max(1.0, float(other.abs().max()))), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_merged_is_the_model_that_was_trained(any_model, scheme, model_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, kind = model_folder(any_model), "dora" if scheme == "int8" else "lora"
    model = adapted(folder, scheme, kind)
    trained = {name: parameter.detach() for name, parameter in model.trained()}
    merged = dict(merged_tensors(folder, trained, model.adapter, quantized=quantized(folder, scheme)))
    from safetensors.torch import save_file

    (tmp_path / "merged").mkdir()
    save_file(
        {n: t.contiguous() for n, t in merged.items()}, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"}
    )
    (tmp_path / "merged" / "config.json").write_bytes((folder / "config.json").read_bytes())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    model.eval()
    with torch.no_grad(), model.own_attention() as module:
        ours = module(input_ids=TOKENS).logits
        theirs = plain(input_ids=TOKENS).logits
    assert torch.allclose(ours, theirs, atol=2e-5 * max(1.0, float(theirs.abs().max())))
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert (again(input_ids=TOKENS).logits - theirs).abs().max() > 1e-3


def test_a_saved_adapter_tells_what_its_base_was_and_goes_on_where_it_was(tiny_llama, tmp_path):
    model = adapted(tiny_llama, "nf4")
    model.save(model.trained(), tmp_path / "adapter", base_model=str(tiny_llama))
    assert QuantisedUnder.read(tmp_path / "adapter") == QuantisedUnder("nf4", "fp32")
    other = load_model(tiny_llama, dtype="fp32", device=CPU, trainable=False, quantized=quantized(tiny_llama, "nf4"))
    load_adapter(other, tmp_path / "adapter", trainable=True)
    assert {n: p.shape for n, p in other.trained()} == {n: p.shape for n, p in model.trained()}
    for one in (model, other):
        one.eval()
    with torch.no_grad(), model.own_attention() as ours, other.own_attention() as theirs:
        assert torch.equal(ours(input_ids=TOKENS).logits, theirs(input_ids=TOKENS).logits)
    (tmp_path / "adapter" / "base_quantization.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"base_quantization.json cannot be read"):
        QuantisedUnder.read(tmp_path / "adapter")


def test_no_layer_holds_a_full_weight_and_no_parameter_is_quantised(tiny_llama):
    """What shards, casts or trains parameters sees none of the packed bytes, and no dense copy is kept for the backward."""
    model = adapted(tiny_llama, "nf4", "dora")
    adapters = [module for module in model.module.modules() if isinstance(module, LoraLinear)]
    assert len(adapters) == len(layers_of(model)) > 0 and all(adapter.weight is None for adapter in adapters)
    assert all(p.dtype == torch.float32 for p in model.module.parameters())
    shapes = {layer.shape for layer in layers_of(model)}
    kept = []
    laid_out = model.lay_out(random_batch([9, 14]))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        TokenLoss()(model.hidden(laid_out), laid_out, model.head)
    assert kept and not any(shape in shapes or shape[::-1] in shapes for shape in kept)


def test_quantised_weights_are_made_once_and_found_again_without_torch(tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setenv("FLEETUNE_CACHE", str(tmp_path))
    made = quantized(tiny_llama, "nf4")
    written = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    assert len(written) == 3, "a file for each of two blocks, and the list"
    code = (
        "import sys; from pathlib import Path; from fleetune.models.quantized_files import prepare_quantized\n"
        f"print(prepare_quantized(Path({str(tiny_llama)!r}), scheme='nf4', fingerprint={tiny_llama.name.ljust(32, '-')!r}, "
        "dtype='fp32')); sys.exit('torch' in sys.modules or 'bitsandbytes' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert found.returncode == 0 and found.stdout.strip() == str(made), found.stderr
    assert written == {file: file.stat().st_mtime_ns for file in made.iterdir()}
    (made / "00001.safetensors").unlink()  # as a cleaner of caches does
    assert quantized(tiny_llama, "nf4") == made and (made / "00001.safetensors").is_file()
    assert not list(made.parent.glob(".*.tmp"))


def test_two_processes_share_the_pages_of_one_file(tiny_llama):
    """On the CPU a layer's bytes are a view into the mapped file, not a copy."""
    folder = quantized(tiny_llama, "int8")
    layer = layers_of(load_model(tiny_llama, dtype="fp32", device=CPU, trainable=False, quantized=folder))[0]
    start = layer.parts()["codes"].data_ptr()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        if low <= start < high:
            assert line.endswith(".safetensors") and str(folder) in line
            return
    raise AssertionError("the codes lie nowhere")


def test_weights_in_several_files_and_experts_one_by_one_are_quantised_too(tmp_path):
    """A sharded folder gives the bytes of the whole one; a mixture as the hub stores it keeps its experts as they are."""
    from safetensors.torch import load_file, save_file

    whole = tiny.write_model(tmp_path / "whole", "llama")
    sharded = tiny.write_model(tmp_path / "sharded", "llama")
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    files = [f"model-{n}-of-2.safetensors" for n in (1, 2)]
    for file, half in zip(files, halves):
        save_file(half, sharded / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, half in zip(files, halves) for name in half}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    first, second = (QuantizedWeights.open(quantized(folder, "nf4")) for folder in (whole, sharded))
    assert list(first.layers) == list(second.layers)
    assert all(torch.equal(first.dense(name, torch.float32), second.dense(name, torch.float32)) for name in first.layers)
    mixtral = tiny.write_model(tmp_path / "mixtral", "mixtral")
    names = [name for name in QuantizedWeights.open(quantized(mixtral, "nf4")).layers]
    assert names and all("self_attn" in name for name in names)
    assert read_shape(mixtral).expert_parameters > 0


def test_where_bitsandbytes_is_missing_one_error_names_the_extra(tiny_llama, monkeypatch, tmp_path):
    from importlib import metadata

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UserError, match=r"pip install 'fleetune\[quant\]'"):
        quantized(tiny_llama, "nf4")


def test_importing_bitsandbytes_asks_no_hub_and_says_nothing():
    """It would ask the package `kernels`, where that is installed, for code from a hub."""
    code = (
        "import sys, types\n"
        "class Trap:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'kernels': sys.exit('kernels was looked for')\n"
        "sys.meta_path.insert(0, Trap())\n"
        "from fleetune.models.quantization import quantize\n"
        "import torch; quantize(torch.ones(2, 64), 'nf4'); assert 'kernels' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "kernels" not in done.stderr, done.stderr
    assert logging.getLogger("bitsandbytes.backends.cpu.ops").level == logging.NOTSET


def test_an_odd_number_of_weights_is_left_as_it_is():
    assert not is_quantizable(7, 5) and is_quantizable(7, 6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_computes_with_the_very_same_base(tiny_llama, scheme):
    folder = quantized(tiny_llama, scheme)
    models = [load_model(tiny_llama, dtype="fp32", device=d, trainable=False, quantized=folder) for d in ("cpu", "cuda")]
    for ours, theirs in zip(layers_of(models[0]), layers_of(models[1])):
        assert torch.equal(ours.dense(), theirs.dense().cpu())
