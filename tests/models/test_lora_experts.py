from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fleetune.models.adapters import add_adapter, load_adapter
from fleetune.models.build import load_model
from fleetune.models.causal import CausalModel
from fleetune.models.merge import merged_tensors
from fleetune.models.objective import TokenLoss
from fleetune.spec.errors import UserError
from micro_batches import random_batch

FAMILIES = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 12,
    },
    "gpt_oss": {"num_local_experts": 6},
}
TARGETS = ("q_proj", "gate_up_proj", "down_proj")


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny

    return tiny.write_model(tmp_path_factory.mktemp("moe") / "m", request.param, **FAMILIES[request.param])


def adapted(folder: Path, **more: Any) -> CausalModel:
    """A model with an adapter on attention and experts whose every weight is random, so that nothing is hidden by zeros."""
    model = load_model(folder, dtype="fp32", device="cpu", trainable=False, seed=3)
    options = {"adapter": "lora", "rank": 3, "alpha": 6.0, "dropout": 0.0, "targets": TARGETS, "seed": 3, **more}
    add_adapter(model, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in model.trained():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def logits(module: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=tokens).logits


def test_plain_peft_loads_it_with_the_same_results(folder: Path, tmp_path: Path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(folder)
    model.save(model.trained(), tmp_path / "adapter", base_model=str(folder))
    tokens = torch.arange(5, 29)[None]
    model.eval()
    with model.own_attention() as module:
        ours = logits(module, tokens)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before = logits(base, tokens)
    theirs = logits(PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), tokens)
    assert (ours - before).abs().max() > 1e-2, "the adapter does nothing: the test shows nothing"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    again = load_adapter(
        load_model(folder, dtype="fp32", device="cpu", trainable=False, seed=3), tmp_path / "adapter", trainable=False
    )
    again.eval()
    with again.own_attention() as module:
        torch.testing.assert_close(logits(module, tokens), ours)

    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stored = dict(merged_tensors(folder, dict(model.trained()), model.adapter))
    state = {name: value.clone() for name, value in merged.state_dict().items()}
    from safetensors.torch import save_file

    plain = tmp_path / "merged"
    plain.mkdir()
    save_file(
        {name: value.contiguous() for name, value in stored.items()}, plain / "model.safetensors", metadata={"format": "pt"}
    )
    (plain / "config.json").write_text((folder / "config.json").read_text())
    whole = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert state.keys() == whole.state_dict().keys()
    torch.testing.assert_close(logits(whole, tokens), ours, rtol=1e-4, atol=1e-5)


def test_only_the_experts_that_tokens_went_to_have_a_gradient(folder: Path):
    model = adapted(folder)
    batch = random_batch([4], share=1.0)
    routed: dict[str, set[int]] = {}
    hooks = []
    for name, module in model.module.named_modules():
        if name.endswith(".experts"):

            def seen(module: Any, args: Any, name: str = name) -> None:
                # Of four tokens, nothing is predicted from the last; behind it may stand padding.
                routed[name] = set(args[1][:3].flatten().tolist())

            hooks.append(module.register_forward_pre_hook(seen))
    model.train()
    laid_out = model.lay_out(batch)
    loss, _ = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
    loss.backward()
    assert routed and any(len(experts) < 6 for experts in routed.values()), "every expert was used: the test shows nothing"
    for name, parameter in model.trained():
        if "_lora.lora_" not in name:
            continue
        owner = name.split(".experts.")[0] + ".experts"
        gradient = parameter.grad
        by_expert = (
            gradient.view(6, 3, -1).abs().sum((1, 2)) if ".lora_A" in name else gradient.view(-1, 3, 6).abs().sum((0, 1))
        )
        assert {expert for expert in range(6) if by_expert[expert] > 0} == routed[owner], name


def test_an_experts_gradient_is_that_of_the_plain_sum(folder: Path):
    """Against autograd through W + scale * B A, made whole."""
    model = adapted(folder)
    batch = random_batch([9, 7], share=0.8)

    def gradients() -> dict[str, torch.Tensor]:
        model.module.zero_grad()
        laid_out = model.lay_out(batch)
        loss, _ = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.trained()}

    ours = gradients()
    from fleetune.models import lora_experts

    plain = lora_experts.LoraStack.adapted
    try:
        lora_experts.LoraStack.adapted = lambda self, stack: plain(self, stack).whole()  # type: ignore[method-assign]
        wanted = gradients()
    finally:
        lora_experts.LoraStack.adapted = plain  # type: ignore[method-assign]
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("more", [{"adapter": "dora"}, {"dropout": 0.1}])
def test_what_stacked_experts_cannot_have_is_refused(folder: Path, more: dict[str, Any]):
    model = load_model(folder, dtype="fp32", device="cpu", trainable=False)
    options: dict[str, Any] = {"adapter": "lora", "rank": 3, "alpha": 6.0, "dropout": 0.0, "seed": 3, **more}
    with pytest.raises(UserError, match=r"on experts \(lora_targets gate_up_proj\)"):
        add_adapter(model, targets=("gate_up_proj",), **options)
