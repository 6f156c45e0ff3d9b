"""The fused loss equals plain cross-entropy, and so do its gradients."""

from __future__ import annotations

import pytest
import torch

from fleetune.models import objective
from fleetune.models.build import load_model
from fleetune.models.head import Head
from fleetune.models.objective import TokenLoss, token_loss
from micro_batches import random_batch

CPU = torch.device("cpu")


def plain_loss(hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float() * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def parts(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(num_tokens, 24, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(50, 24, generator=generator) * 0.5).to(dtype).requires_grad_()
    bias = torch.randn(50, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, 50, (num_tokens,), generator=generator)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(monkeypatch, scale, softcap, with_bias, num_tokens):
    monkeypatch.setattr(objective, "_CHUNK_BYTES", 4 * 50 * 10)  # ten tokens a chunk: the last one is short
    hidden, weight, bias, targets = parts(num_tokens)
    head = Head(weight, bias if with_bias else None, torch.float32, scale, softcap)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    wanted = plain_loss(hidden, targets, head)
    wanted_gradients = torch.autograd.grad(wanted * 0.125, inputs)
    found = token_loss(hidden, targets, head)
    gradients = torch.autograd.grad(found * 0.125, inputs)
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted, rtol=1e-6)
    for gradient, other in zip(gradients, wanted_gradients):
        assert torch.allclose(gradient, other, atol=2e-6)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do():
    hidden, weight, _, targets = parts(9)
    weight.requires_grad_(False)
    token_loss(hidden, targets, Head(weight, None, torch.float32)).backward()
    assert weight.grad is None and hidden.grad is not None


def test_without_gradients_the_loss_is_the_same():
    hidden, weight, bias, targets = parts(33)
    head = Head(weight, bias, torch.float32, 1.0, 5.0)
    with torch.no_grad():
        quiet = token_loss(hidden, targets, head)
    assert torch.allclose(quiet, token_loss(hidden, targets, head), rtol=1e-6)
    assert not quiet.requires_grad


def test_bf16_stays_within_the_rounding_of_its_products():
    """Products in bf16 (8 bits), the rest in fp32: per token 1 %, and gradients within 1 % of the largest."""
    hidden, weight, _, targets = parts(64, torch.bfloat16)
    exact_hidden, exact_weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    wanted = plain_loss(exact_hidden, targets, Head(exact_weight, None, torch.float32))
    wanted.backward()
    found = token_loss(hidden, targets, Head(weight, None, torch.bfloat16))
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-2)
    for gradient, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert gradient.dtype == torch.bfloat16
        assert float((gradient.float() - exact).abs().max()) < 1e-2 * float(exact.abs().max())


def test_fp32_masters_with_products_in_bf16_get_fp32_gradients():
    hidden, weight, _, targets = parts(16)
    token_loss(hidden, targets, Head(weight, None, torch.bfloat16)).backward()
    assert weight.grad.dtype == hidden.grad.dtype == torch.float32


def test_the_logits_never_all_exist(monkeypatch):
    """Peak memory of the loss does not grow with the number of tokens times the vocabulary."""
    made = []
    plain = torch.nn.functional.linear
    monkeypatch.setattr(objective, "_CHUNK_BYTES", 4 * 50 * 8)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *rest: made.append(len(x)) or plain(x, *rest))
    hidden, weight, _, targets = parts(64)
    token_loss(hidden, targets, Head(weight, None, torch.float32))
    assert made == [8] * 8


def test_extreme_logits_give_finite_losses_and_gradients():
    hidden, weight, _, targets = parts(8)
    loss = token_loss(hidden * 1e4, targets, Head(weight, None, torch.float32))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(hidden.grad).all()


def test_no_trained_token_gives_zero_with_gradients_of_zero():
    hidden, weight, bias, targets = parts(0)
    loss = token_loss(hidden, targets, Head(weight, bias, torch.float32))
    loss.backward()
    assert loss.item() == 0.0 and not weight.grad.any() and not bias.grad.any() and hidden.grad.shape == (0, 24)


@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma2", "gptj", "phi", "granite", "cohere", "gpt_neox"])
def test_the_loss_of_a_model_is_that_of_its_own_forward(name, model_folder):
    """Scale, soft cap and bias behind the head are found by looking: the loss is transformers' own."""
    from transformers import AutoModelForCausalLM

    folder = model_folder(name)
    batch = random_batch([40])
    own = AutoModelForCausalLM.from_pretrained(folder)
    labels = torch.where(torch.from_numpy(batch.trained), torch.from_numpy(batch.tokens), -100)[None]
    with torch.no_grad():
        logits = own(input_ids=torch.from_numpy(batch.tokens)[None]).logits.float()
    wanted = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    model = load_model(folder, dtype="fp32", device=CPU, trainable=False)
    model.eval()
    with torch.no_grad():
        laid_out = model.lay_out(batch)
        hidden = model.hidden(laid_out)
        loss, weight = TokenLoss()(hidden, laid_out, model.head)
        assert torch.allclose(model.logits(hidden), logits[0][laid_out.select], atol=1e-5)
    assert weight == batch.num_trained_tokens
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_a_family_that_does_something_else_behind_its_head_is_refused(model_folder, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    from fleetune.spec.errors import UserError

    forward = LlamaForCausalLM.forward

    def shifted(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + 1.0
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    with pytest.raises(UserError, match="neither a scale nor a soft cap"):
        load_model(model_folder("llama"), dtype="fp32", device=CPU, trainable=False)
