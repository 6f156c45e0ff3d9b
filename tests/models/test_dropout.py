"""What is dropped is a function of the key alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fleetune.models.adapters import add_adapter
from fleetune.models.build import load_model
from fleetune.models.causal import CausalModel
from fleetune.models.dropout import KeyedDropout, Randomness, token_keys
from fleetune.models.layout import lay_out
from fleetune.models.objective import TokenLoss
from fleetune.spec.errors import UserError
from micro_batches import one_by_one, random_batch

CPU = torch.device("cpu")
#: Families with dropout of every kind: modules and functions, activations and attention probabilities.
DROPPING = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "opt": {"attention_dropout": 0.2, "dropout": 0.2},
    "gptj": {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "gpt_neox": {"attention_dropout": 0.3, "hidden_dropout": 0.2},
    "phi": {"attention_dropout": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
    "bloom": {"attention_dropout": 0.3, "hidden_dropout": 0.2},
    "falcon": {"attention_dropout": 0.3, "hidden_dropout": 0.2},
    "gpt_oss": {"attention_dropout": 0.3},
    "mixtral": {"attention_dropout": 0.3},
}


def masks(batch, *, seed=0, name="a", rate=0.25, width=64) -> torch.Tensor:
    """bool [tokens, width]: what is kept of a flat row."""
    randomness = Randomness(seed)
    dropout = KeyedDropout(rate, name, randomness)
    laid_out = lay_out(batch, "flat", CPU)
    with randomness.about(laid_out):
        return dropout(torch.ones(*laid_out.tokens.shape, width))[0, : batch.num_tokens] != 0


def test_the_rate_is_right_and_what_is_kept_is_scaled():
    batch = random_batch([500] * 8)
    randomness = Randomness(1)
    for rate in (0.05, 0.25, 0.5, 0.9):
        with randomness.about(lay_out(batch, "flat", CPU)):
            values = KeyedDropout(rate, "x", randomness)(torch.ones(1, 4000, 64))
        dropped = float((values == 0).float().mean())
        assert dropped == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 256_000) ** 0.5 + 1e-5)
        assert values.max().item() == pytest.approx(1 / (1 - rate), rel=1e-3)


def test_masks_of_other_keys_are_independent():
    """Changing any part of the key gives a mask that agrees with the first no more often than chance."""
    batch = random_batch([400] * 4)
    first = masks(batch, rate=0.5)
    others = {
        "seed": masks(batch, rate=0.5, seed=1),
        "step": masks(dataclasses.replace(batch, step=4), rate=0.5),
        "sequence": masks(dataclasses.replace(batch, sequences=(900, 901, 902, 903)), rate=0.5),
        "name": masks(batch, rate=0.5, name="b"),
        "next position": first.roll(1, 0),
        "next sequence": first.roll(400, 0),
        "next feature": first.roll(1, 1),
        "other half of a word": first.roll(32, 1),
    }
    for what, other in others.items():
        agreement = float((first == other).float().mean())
        assert agreement == pytest.approx(0.5, abs=5 * 0.5 / first.numel() ** 0.5), what


def test_rows_and_columns_are_as_uneven_as_chance_makes_them():
    """The variance of the counts per row and per column is the binomial one: no feature and no token is favoured."""
    keep = masks(random_batch([1000] * 2), rate=0.5, width=512).double()
    for counts, trials in ((keep.sum(1), 512), (keep.sum(0), 2000)):
        ratio = float(counts.var() / (trials * 0.25))
        assert 0.8 < ratio < 1.25
    centred = keep - 0.5
    correlation = centred.T @ centred / (0.25 * 2000)
    off = correlation - torch.diag(correlation.diag())
    assert float(off.abs().max()) < 6 / 2000**0.5, "two features are dropped together"
    assert float(off.pow(2).mean()) == pytest.approx(1 / 2000, rel=0.1)


def test_the_bytes_of_a_token_key_look_random():
    keys = token_keys(0, 0, np.zeros(65_536, dtype=np.int64), np.arange(65_536))
    assert len(np.unique(keys)) == 65_536
    counts = np.stack([np.bincount(keys.view(np.uint8).reshape(-1, 8)[:, byte], minlength=256) for byte in range(8)])
    chi_squared = ((counts - 256) ** 2 / 256).sum(axis=1)
    assert (chi_squared < 255 + 6 * (2 * 255) ** 0.5).all()


def test_a_mask_does_not_depend_on_the_processs_random_state():
    torch.manual_seed(1)
    first = masks(random_batch([9, 9]))
    torch.rand(10)
    assert torch.equal(first, masks(random_batch([9, 9])))


def test_the_width_of_a_layer_changes_no_mask_of_its_first_features():
    assert torch.equal(masks(random_batch([9]), width=64)[:, :33], masks(random_batch([9]), width=33))


def test_values_of_unknown_tokens_are_refused():
    randomness = Randomness(0)
    dropout = KeyedDropout(0.5, "x", randomness)
    with pytest.raises(RuntimeError, match="its tokens"):
        dropout(torch.ones(1, 4, 8))
    with randomness.about(lay_out(random_batch([5]), "flat", CPU)), pytest.raises(NotImplementedError, match=r"config\.json"):
        dropout(torch.ones(3, 8))


def test_rate_zero_and_eval_mode_change_nothing():
    values = torch.ones(1, 4, 8)
    assert KeyedDropout(0.0, "x", Randomness(0))(values) is values
    assert KeyedDropout(0.5, "x", Randomness(0)).eval()(values) is values


def dropping_model(name: str, tmp_path, **options) -> CausalModel:
    import tiny

    folder = tmp_path / name
    if not folder.exists():
        tiny.write_model(folder, name, **DROPPING[name])
    return load_model(folder, dtype="fp32", device=CPU, trainable=True, seed=7, **options)


def losses(model: CausalModel, batches) -> list[float]:
    found = []
    for batch in batches:
        laid_out = model.lay_out(batch)
        with torch.no_grad():
            found.append(TokenLoss()(model.hidden(laid_out), laid_out, model.head)[0].item())
    return found


@pytest.mark.parametrize("name", DROPPING)
def test_a_models_own_dropout_is_the_same_split_or_packed_and_in_both_layouts(name, tmp_path):
    model = dropping_model(name, tmp_path)
    batch = random_batch([7, 12, 5, 20, 7])
    assert not any(type(module) is nn.Dropout and module.p > 0 for module in model.module.modules())
    torch.manual_seed(0)
    (packed,) = losses(model, [batch])
    torch.manual_seed(99)
    alone = sum(losses(model, one_by_one(batch)))
    assert packed == pytest.approx(alone, rel=2e-6)
    if model.layout == "flat":
        model.use_layout("documents")
        assert losses(model, [batch])[0] == pytest.approx(packed, rel=2e-6)
    (other_step,) = losses(model, [dataclasses.replace(batch, step=9)])
    assert abs(other_step - packed) > 1e-4, "dropout must do something"
    model.eval()
    assert losses(model, [batch])[0] != pytest.approx(packed, rel=1e-6)


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_under_gradient_checkpointing_is_the_same_in_the_recomputation(name, tmp_path):
    batch = random_batch([7, 12, 5])
    found = []
    for checkpointing in (False, True):
        model = dropping_model(name, tmp_path, gradient_checkpointing=checkpointing)
        other = model.lay_out(random_batch([3, 4], seed=8))
        laid_out = model.lay_out(batch)
        loss, _ = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
        with torch.no_grad():
            model.hidden(other)  # another micro-batch runs before the backward, as in a pipeline
        loss.backward()
        found.append({n: p.grad for n, p in model.trained() if p.grad is not None})
    for parameter, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][parameter], atol=1e-6), parameter


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapter_dropout_is_keyed_too(kind, model_folder):
    model = load_model(model_folder("llama"), dtype="fp32", device=CPU, trainable=False, seed=7)
    add_adapter(model, adapter=kind, rank=4, alpha=8, dropout=0.4, targets=(), seed=1)
    with torch.no_grad():
        for name, parameter in model.trained():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    batch = random_batch([7, 12, 5, 20])
    (packed,) = losses(model, [batch])
    assert packed == pytest.approx(sum(losses(model, one_by_one(batch))), rel=2e-6)
    model.use_layout("documents")
    assert losses(model, [batch])[0] == pytest.approx(packed, rel=2e-6)
    model.eval()
    assert abs(losses(model, [batch])[0] - packed) > 1e-4


def test_noise_that_cannot_be_keyed_is_refused(tmp_path):
    import tiny

    folder = tiny.write_model(tmp_path / "opt", "opt", layerdrop=0.1)
    with pytest.raises(UserError, match="layerdrop"):
        load_model(folder, dtype="fp32", device=CPU, trainable=True)
