"""A model folder becomes the model that transformers makes of it, with its weights shared or owned as they must be."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fleetune.models.build import load_model, read_module
from fleetune.models.objective import TokenLoss
from fleetune.spec.errors import UserError
from micro_batches import random_batch, train_all

CPU = torch.device("cpu")


def from_transformers(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_buffers_and_logits_are_those_of_transformers(any_model, dtype, model_folder):
    folder = model_folder(any_model)
    own = from_transformers(folder, dtype)
    ours = read_module(folder, dtype=dtype, device=CPU, trainable=False).eval()
    for kind in ("named_parameters", "named_buffers"):
        wanted, found = dict(getattr(own, kind)()), dict(getattr(ours, kind)())
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            assert value.dtype == found[name].dtype, name
            assert torch.equal(value, found[name]), name
    assert own.config._attn_implementation == ours.config._attn_implementation
    tokens = torch.tensor([[5, 9, 17, 40, 2, 8]])
    with torch.no_grad():
        assert torch.equal(own(input_ids=tokens).logits, ours(input_ids=tokens).logits)


def test_a_tied_head_is_one_parameter_with_the_embedding(model_folder):
    for name, tied in (("llama tied", True), ("gemma", True), ("llama", False)):
        model = load_model(model_folder(name), dtype="fp32", device=CPU, trainable=True)
        head, embedding = (model.module.get_submodule(part) for part in (model.anatomy.head, model.anatomy.embedding))
        assert (head.weight is embedding.weight) == model.anatomy.head_tied == tied


def test_trained_weights_are_fp32_masters_whatever_the_forward_computes_in(model_folder):
    model = load_model(model_folder("llama"), dtype="bf16", device=CPU, trainable=True)
    assert {p.dtype for _, p in model.trained()} == {torch.float32}
    assert len(list(model.trained())) == len(list(model.module.parameters()))
    exact = load_model(model_folder("llama"), dtype="fp32", device=CPU, trainable=True)
    batch = train_all(random_batch([20, 9]))
    losses = []
    for each in (model, exact):
        laid_out = each.lay_out(batch)
        loss, _ = TokenLoss()(each.hidden(laid_out), laid_out, each.head)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert all(p.grad.dtype == torch.float32 for _, p in model.trained())


def test_frozen_weights_take_no_gradient_and_trained_ones_all_do(model_folder):
    assert not list(load_model(model_folder("gpt2"), dtype="fp32", device=CPU, trainable=False).trained())


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory) -> Path:
    """About 50 MB of weights: enough to tell from the noise of a process's memory."""
    import tiny

    folder = tmp_path_factory.mktemp("wide")
    return tiny.write_model(folder, "llama", hidden_size=768, intermediate_size=3072, num_hidden_layers=2, vocab_size=400)


def anonymous_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Anonymous line")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps_rollup")
def test_frozen_weights_on_the_cpu_are_pages_of_the_file_and_not_a_copy(wide_llama):
    """Processes of a node share one copy: a private one would be anonymous memory."""
    size = (wide_llama / "model.safetensors").stat().st_size
    assert size > 40 << 20
    batch = train_all(random_batch([30]))
    load_model(wide_llama, dtype="fp32", device=CPU, trainable=False)  # what the first load imports
    gc.collect()
    before = anonymous_bytes()
    model = load_model(wide_llama, dtype="fp32", device=CPU, trainable=False)
    with torch.no_grad():
        hidden = model.hidden(model.lay_out(batch))  # every weight is read
    grown = anonymous_bytes() - before
    assert hidden.isfinite().all()
    assert grown < size // 4, f"{grown >> 20} MB of private memory for {size >> 20} MB of frozen weights"
    gc.collect()  # what earlier tests left must not be freed, and counted against the copy, in between
    before = anonymous_bytes()
    owned = load_model(wide_llama, dtype="fp32", device=CPU, trainable=True)
    assert anonymous_bytes() - before > size // 2, "the measure must see a private copy"
    del owned


def test_training_never_writes_into_the_files(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "llama")
    content = (folder / "model.safetensors").read_bytes()
    model = load_model(folder, dtype="fp32", device=CPU, trainable=True)
    with torch.no_grad():
        for _, parameter in model.trained():
            parameter.add_(1.0)
    assert (folder / "model.safetensors").read_bytes() == content


def changed(folder: Path, target: Path, change) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_missing_unexpected_and_misshaped_weights_are_all_told_at_once(model_folder, tmp_path):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["lm_head.weight"] = torch.zeros(3, 48)

    folder = changed(model_folder("llama"), tmp_path / "spoilt", spoil)
    with pytest.raises(UserError) as error:
        load_model(folder, dtype="fp32", device=CPU, trainable=False)
    assert len(error.value.problems) == 3
    assert "model.norm.weight" in error.value.problems[0]
    assert "model.layers.7.mlp.up_proj.weight" in error.value.problems[1]
    assert "lm_head.weight has shape (3, 48)" in error.value.problems[2]


def test_the_same_faults_are_told_where_transformers_must_convert(model_folder, tmp_path):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        tensors["model.strange"] = torch.zeros(2)

    folder = changed(model_folder("mixtral"), tmp_path / "spoilt", spoil)
    with pytest.raises(UserError) as error:
        load_model(folder, dtype="fp32", device=CPU, trainable=False)
    assert "model.norm.weight" in str(error.value) and "model.strange" in str(error.value)


def test_buffers_that_older_versions_stored_are_no_fault(model_folder, tmp_path):
    def add(tensors):
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)

    folder = changed(model_folder("gpt2"), tmp_path / "old", add)
    load_model(folder, dtype="fp32", device=CPU, trainable=False)


def test_names_without_the_prefix_of_the_body_are_found(model_folder, tmp_path):
    """GPT-2 on the hub is stored as its bare body."""

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    folder = changed(model_folder("gpt2"), tmp_path / "bare", strip)
    wanted = load_model(model_folder("gpt2"), dtype="fp32", device=CPU, trainable=False)
    found = load_model(folder, dtype="fp32", device=CPU, trainable=False)
    for name, value in wanted.module.named_parameters():
        assert torch.equal(value, found.module.get_parameter(name))


def test_weights_in_several_files_are_read_by_their_index(model_folder, tmp_path):
    source = from_transformers(model_folder("qwen3"), torch.float32)
    source.save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    model = load_model(tmp_path / "parts", dtype="fp32", device=CPU, trainable=False)
    for name, value in source.named_parameters():
        assert torch.equal(value, model.module.get_parameter(name))


def test_an_index_that_points_out_of_its_folder_is_refused(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors", "model.norm.weight": "absent.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError) as error:
        load_model(folder, dtype="fp32", device=CPU, trainable=False)
    assert "../elsewhere.safetensors" in error.value.problems[0] and "absent.safetensors" in error.value.problems[1]


def test_pickled_weights_are_never_read(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickles"):
        load_model(folder, dtype="fp32", device=CPU, trainable=False)


def test_a_model_that_is_not_causal_is_refused(tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
    BertLMHeadModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="lets a token see the tokens after it"):
        load_model(tmp_path, dtype="fp32", device=CPU, trainable=False)


def test_an_encoder_decoder_is_refused(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 48, "num_layers": 2, "num_heads": 4, "d_kv": 12, "d_ff": 96, "vocab_size": 100}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="decoder-only"):
        load_model(tmp_path, dtype="fp32", device=CPU, trainable=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom", "mamba", "mixtral"])
def test_gradient_checkpointing_computes_blocks_twice_and_gives_the_same_gradients(name, model_folder):
    batch = random_batch([20, 13])
    found = {}
    for checkpointing in (False, True):
        model = load_model(model_folder(name), dtype="fp32", device=CPU, trainable=True, gradient_checkpointing=checkpointing)
        runs = []
        first = next(m for m in model.module.get_submodule(model.anatomy.block_names()[0]).modules() if not list(m.children()))
        first.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        laid_out = model.lay_out(batch)
        loss, _ = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
        loss.backward()
        found[checkpointing] = (loss.item(), {n: p.grad for n, p in model.trained() if p.grad is not None}, len(runs))
    assert (found[False][2], found[True][2]) == (1, 2)
    assert found[False][0] == found[True][0]
    for parameter, gradient in found[False][1].items():
        assert torch.equal(gradient, found[True][1][parameter]), parameter


def test_generation_uses_the_models_own_attention_and_the_layout_comes_back(model_folder):
    own = from_transformers(model_folder("llama"), torch.float32)
    model = load_model(model_folder("llama"), dtype="fp32", device=CPU, trainable=False)
    model.eval()
    prompt = torch.tensor([[5, 9, 17, 40]])
    batch = train_all(random_batch([20, 9]))
    with torch.no_grad():
        before = model.hidden(model.lay_out(batch))
        with model.own_attention() as module:
            found = module.generate(prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(found, own.generate(prompt, max_new_tokens=8, do_sample=False))
        assert torch.equal(before, model.hidden(model.lay_out(batch)))


def test_a_fully_trained_model_is_saved_for_plain_transformers(any_model, model_folder, tmp_path):
    # Without operations of ours: then the logits are plain transformers' to the last bit, if the weights are.
    model = load_model(model_folder(any_model), dtype="fp32", device=CPU, trainable=True, fast=False)
    model.eval()
    with torch.no_grad():
        for _, parameter in model.trained():
            parameter.mul_(1.25)
    names = model.save(((n, p) for n, p in model.trained()), tmp_path / "saved", base_model="tiny")
    assert names == set(load_file(tmp_path / "saved" / "model.safetensors"))
    tokens = torch.tensor([[5, 9, 17, 40, 2, 8]])
    loaded = from_transformers(tmp_path / "saved", "auto")
    with torch.no_grad(), model.own_attention() as module:
        assert torch.equal(loaded(input_ids=tokens).logits, module(input_ids=tokens).logits)


def test_half_a_model_is_not_saved(model_folder, tmp_path):
    model = load_model(model_folder("llama"), dtype="fp32", device=CPU, trainable=True)
    with pytest.raises(ValueError, match="did not come"):
        model.save(list(model.trained())[1:], tmp_path / "saved", base_model="tiny")
    spoilt = ((name, p * float("nan") if "norm" in name else p) for name, p in model.trained())
    with pytest.raises(ValueError, match="not finite"):
        model.save(spoilt, tmp_path / "again", base_model="tiny")
