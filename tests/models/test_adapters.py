"""Adapters are PEFT's: same files, same logits, same gradients, same merged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fleetune.models.adapters import add_adapter, load_adapter
from fleetune.models.build import load_model
from fleetune.models.causal import CausalModel
from fleetune.models.lora import LoraLinear
from fleetune.models.merge import merged_tensors
from fleetune.models.objective import TokenLoss
from fleetune.spec.errors import UserError
from micro_batches import random_batch

CPU = torch.device("cpu")
KINDS = ("lora", "rslora", "dora")
TOKENS = torch.tensor([[5, 9, 17, 40, 2, 8, 33, 120]])


def adapted(folder: Path, kind="lora", *, dtype="fp32", targets=(), rank=4, dropout=0.0, seed=3, spread=0.2) -> CausalModel:
    """A frozen model with an adapter whose second factors are not zero."""
    model = load_model(folder, dtype=dtype, device=CPU, trainable=False)
    add_adapter(model, adapter=kind, rank=rank, alpha=6, dropout=dropout, targets=targets, seed=seed)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.trained():
            if "lora_B" in name:
                parameter.normal_(0, spread, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1.1)
    model.eval()
    return model


def logits_of(model: CausalModel) -> torch.Tensor:
    with torch.no_grad(), model.own_attention() as module:
        return module(input_ids=TOKENS).logits.float()


def saved(model: CausalModel, folder: Path, base: Path) -> Path:
    model.save(model.trained(), folder, base_model=str(base))
    return folder


def in_peft(base: Path, adapter: Path, dtype=torch.float32, **options):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), adapter, **options).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_gives_plain_peft_the_same_logits_and_gradients(any_model, kind, model_folder, tmp_path):
    base = model_folder(any_model)
    model = adapted(base, kind)
    peft_model = in_peft(base, saved(model, tmp_path / "adapter", base), is_trainable=True)
    wanted = peft_model(input_ids=TOKENS).logits
    plain = load_model(base, dtype="fp32", device=CPU, trainable=False)
    plain.eval()
    assert (logits_of(model) - logits_of(plain)).abs().max() > 1e-2, "the adapter must do something"
    assert torch.allclose(logits_of(model), wanted, atol=1e-5)
    wanted.square().sum().backward()
    with model.own_attention() as module:
        module(input_ids=TOKENS).logits.square().sum().backward()
    theirs = {name.replace(".default", ""): p for name, p in peft_model.named_parameters() if p.requires_grad}
    ours = dict(model.trained())
    assert len(theirs) == len(ours) > 0
    for name, parameter in ours.items():
        other = theirs.get(f"base_model.model.{name}", theirs.get(f"base_model.model.{name}.weight")).grad
        assert parameter.grad.dtype == torch.float32
        assert torch.allclose(parameter.grad, other, atol=1e-5 * max(1.0, float(other.abs().max()))), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama tied", "gpt2", "mixtral", "gpt_neox"])
def test_merged_weights_are_those_of_peft_to_the_last_bit(name, kind, dtype, model_folder, tmp_path):
    """gpt2 has transposed weights, mixtral's and gpt_neox's files other names than the model: each its own trap."""
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=dtype).save_pretrained(base)
    model = adapted(base, kind, dtype="bf16" if dtype == torch.bfloat16 else "fp32")
    adapter = saved(model, tmp_path / "adapter", base)
    merged = dict(merged_tensors(base, dict(model.trained()), model.adapter))
    shutil.copytree(base, tmp_path / "merged")
    save_file(merged, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    assert {key: value.dtype for key, value in merged.items()} == {
        key: value.dtype for key, value in load_file(base / "model.safetensors").items()
    }
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    theirs = in_peft(base, adapter, dtype).merge_and_unload()
    for key, value in theirs.named_parameters():
        assert torch.equal(value, ours.get_parameter(key)) or (
            kind == "dora" and torch.allclose(value, ours.get_parameter(key), rtol=1e-6 if dtype == torch.float32 else 8e-3)
        ), key
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == model.anatomy.head_tied
    if dtype == torch.float32:
        assert torch.allclose(ours(input_ids=TOKENS).logits, logits_of(model), atol=1e-4)


def test_a_saved_adapter_goes_on_where_it_was(model_folder, tmp_path):
    for name, kind in (("llama", "dora"), ("gpt2", "rslora"), ("gpt_neox", "lora")):
        base = model_folder(name)
        model = adapted(base, kind, dropout=0.1)
        folder = saved(model, tmp_path / name, base)
        again = load_adapter(load_model(base, dtype="fp32", device=CPU, trainable=False), folder, trainable=True)
        again.eval()
        assert again.adapter == model.adapter
        assert torch.equal(logits_of(model), logits_of(again))
        assert [n for n, _ in again.trained()] == [n for n, _ in model.trained()]
        frozen = load_adapter(load_model(base, dtype="fp32", device=CPU, trainable=False), folder, trainable=False)
        assert not list(frozen.trained())


def test_an_adapter_of_pefts_own_is_loaded_with_its_patterns(model_folder, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = model_folder("llama")
    config = LoraConfig(
        r=4,
        lora_alpha=9,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={"down_proj": 3},
        layers_to_transform=[0, 1],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    theirs.save_pretrained(tmp_path)
    model = load_adapter(load_model(base, dtype="fp32", device=CPU, trainable=False), tmp_path, trainable=True)
    model.eval()
    assert torch.allclose(logits_of(model), theirs(input_ids=TOKENS).logits, atol=1e-6)
    folder = saved(model, tmp_path / "again", base)
    assert torch.allclose(in_peft(base, folder)(input_ids=TOKENS).logits, logits_of(model), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "type IA3"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_an_adapter_that_does_more_than_low_rank_layers_is_refused(change, words, model_folder, tmp_path):
    base = model_folder("llama")
    folder = saved(adapted(base), tmp_path, base)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=words):
        load_adapter(load_model(base, dtype="fp32", device=CPU, trainable=False), folder, trainable=True)


def test_an_adapter_of_another_base_model_is_refused(model_folder, tmp_path):
    import tiny

    base = model_folder("llama")
    folder = saved(adapted(base), tmp_path / "adapter", base)
    wider = tiny.write_model(tmp_path / "wide", "llama", hidden_size=64)
    with pytest.raises(UserError, match=r"of shape \(4, 48\)"):
        load_adapter(load_model(wider, dtype="fp32", device=CPU, trainable=False), folder, trainable=True)
    with pytest.raises(UserError, match="no linear layer"):
        load_adapter(load_model(model_folder("gpt2"), dtype="fp32", device=CPU, trainable=False), folder, trainable=True)


def test_half_an_adapter_is_neither_saved_nor_loaded(model_folder, tmp_path):
    base = model_folder("llama")
    model = adapted(base)
    with pytest.raises(ValueError, match="not whole"):
        model.save(list(model.trained())[1:], tmp_path / "half", base_model="x")
    with pytest.raises(ValueError, match="not finite"):
        model.save(((n, p * float("inf")) for n, p in model.trained()), tmp_path / "half", base_model="x")
    assert not (tmp_path / "half").exists()
    folder = saved(model, tmp_path / "whole", base)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="lacks"):
        load_adapter(load_model(base, dtype="fp32", device=CPU, trainable=False), folder, trainable=True)


def test_new_weights_are_a_function_of_seed_and_name(model_folder):
    base = model_folder("llama")

    def fresh(seed: int, noise: int, targets=()) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        model = load_model(base, dtype="fp32", device=CPU, trainable=False)
        add_adapter(model, adapter="lora", rank=4, alpha=8, dropout=0, targets=targets, seed=seed)
        return {name: parameter.detach().clone() for name, parameter in model.trained()}

    first, again, other = fresh(0, 1), fresh(0, 2), fresh(1, 1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    down = [name for name in first if "lora_A" in name]
    assert all(not torch.equal(first[name], other[name]) for name in down)
    assert all(not first[name].any() for name in first if "lora_B" in name)
    few = fresh(0, 3, targets=("v_proj",))
    assert all(torch.equal(few[name], first[name]) for name in few), "other adapters beside it change no weight"
    bound = 1 / 48**0.5
    values = torch.cat([first[name].flatten() for name in down if first[name].shape[1] == 48])
    assert values.abs().max() <= bound and values.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_a_new_adapter_changes_nothing_yet(any_model, model_folder):
    base = model_folder(any_model)
    plain = load_model(base, dtype="fp32", device=CPU, trainable=False)
    plain.eval()
    for kind in KINDS:
        model = load_model(base, dtype="fp32", device=CPU, trainable=False)
        add_adapter(model, adapter=kind, rank=4, alpha=8, dropout=0, targets=(), seed=0)
        model.eval()
        assert torch.allclose(logits_of(model), logits_of(plain), atol=1e-6)


def test_every_trained_weight_gets_a_gradient(any_model, model_folder):
    """A target whose layer the family never calls would train nothing, in silence."""
    model = adapted(model_folder(any_model), "dora")
    batch = random_batch([40, 50])
    laid_out = model.lay_out(batch)
    TokenLoss()(model.hidden(laid_out), laid_out, model.head)[0].backward()
    for name, parameter in model.trained():
        assert parameter.grad is not None and parameter.grad.any(), name
    frozen = [p for p in model.module.parameters() if not p.requires_grad]
    assert frozen and all(p.grad is None for p in frozen)


def test_targets_choose_layers_and_empty_means_all_of_the_blocks(model_folder):
    model = adapted(model_folder("llama"), targets=("q_proj", "mlp.down_proj"))
    assert set(model.adapter.targets) == {
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert model.adapter.short_targets == ("down_proj", "q_proj")
    assert len(adapted(model_folder("llama")).adapter.targets) == 14
    one = adapted(model_folder("llama"), targets=("model.layers.1.self_attn.q_proj",))
    assert one.adapter.targets == ("model.layers.1.self_attn.q_proj",) and one.adapter.short_targets == ()
    assert not isinstance(one.module.lm_head, LoraLinear)


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("llama", "q_porj", "did you mean q_proj"),
        ("llama", "lm_head", "is the head"),
        ("mamba", "out_proj", "leave this target out"),
    ],
)
def test_a_target_that_names_nothing_is_refused_with_what_there_is(name, target, words, model_folder):
    model = load_model(model_folder(name), dtype="fp32", device=CPU, trainable=False)
    with pytest.raises(UserError, match=words) as error:
        add_adapter(model, adapter="lora", rank=4, alpha=8, dropout=0, targets=(target, "nonsense"), seed=0)
    assert len(error.value.problems) == 2, "all unknown targets are told at once"


def test_adapter_weights_are_fp32_over_a_bf16_base(model_folder):
    exact, low = adapted(model_folder("llama")), adapted(model_folder("llama"), dtype="bf16")
    assert {p.dtype for _, p in low.trained()} == {torch.float32}
    batch = random_batch([30])
    losses = []
    for model in (exact, low):
        laid_out = model.lay_out(batch)
        loss, _ = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    for (name, p), (_, q) in zip(exact.trained(), low.trained()):
        assert q.grad.dtype == torch.float32
        assert torch.allclose(p.grad, q.grad, atol=0.1 * float(p.grad.abs().max())), name


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mamba"])
def test_gradient_checkpointing_reaches_the_adapters_of_a_frozen_model(name, model_folder):
    """The first block's input needs no gradient: a reentrant checkpoint would train nothing, in silence."""
    batch = random_batch([20, 13])
    found = []
    for checkpointing in (False, True):
        model = load_model(
            model_folder(name), dtype="fp32", device=CPU, trainable=False, gradient_checkpointing=checkpointing, seed=7
        )
        add_adapter(model, adapter="lora", rank=4, alpha=8, dropout=0.2, targets=(), seed=1)
        laid_out = model.lay_out(batch)
        TokenLoss()(model.hidden(laid_out), laid_out, model.head)[0].backward()
        found.append({name: parameter.grad for name, parameter in model.trained()})
    for parameter, gradient in found[0].items():
        assert torch.equal(gradient, found[1][parameter]), parameter
        assert gradient.any() or "lora_A" in parameter


def test_a_frozen_layer_keeps_only_its_input_for_the_backward(model_folder):
    """The adapted layer saves x once, and x A^T, which is as wide as the rank; no result: what makes long sequences fit."""
    layer = adapted(model_folder("llama")).module.model.layers[0].mlp.down_proj
    x = torch.randn(1, 64, 96, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    activations = {t.untyped_storage().data_ptr(): tuple(t.shape) for t in kept if t.shape[0] == 64}
    assert activations.pop(x.untyped_storage().data_ptr()) == (64, 96)
    assert list(activations.values()) == [(64, 4)]
