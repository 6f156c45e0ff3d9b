"""Operations of ours stand where a family's own do the same, and mean the same there: plain transformers and PEFT say so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from fleetune.models.build import load_model
from fleetune.models.causal import CausalModel
from fleetune.models.fast import gate_activation, norm_form, replace_operations, with_rotation
from fleetune.models.objective import TokenLoss
from fleetune.models.wanted import WantedAdapter, WantedModel, load_whole
from fleetune.spec.records import MicroBatch
from micro_batches import one_by_one, random_batch
from models.awake import awake

CPU = torch.device("cpu")
BATCH = random_batch([7, 40, 5, 33, 7, 2, 1, 19])
#: How many of (norm, gated, rotary) are replaced in two blocks; (0, 0, 0) where nothing is recognised.
RECOGNISED = {
    **{name: (5, 2, 2) for name in ("llama", "llama tied", "mistral", "mistral with a window", "gemma", "granite")},
    "qwen3": (9, 2, 2),
    "gemma2": (9, 2, 2),
    "mixtral": (5, 0, 2),
    "gpt_oss": (5, 0, 0),
    "gpt_oss with windows": (5, 0, 0),
    "mamba": (3, 0, 0),
    "cohere": (0, 2, 0),
    "gpt_neox": (0, 0, 2),
    "phi": (0, 0, 2),
    "falcon": (0, 0, 2),
    "falcon with alibi": (0, 0, 2),
    "falcon, new decoder": (0, 0, 2),
}


def loaded(folder: Path, *, precision="fp32", fast=True, dropout=0.0, kind="lora") -> CausalModel:
    """A model with an adapter that does something."""
    adapter = WantedAdapter(kind, 4, 8.0, dropout, ())
    return awake(load_whole(WantedModel(folder, precision, adapter=adapter, fast=fast), CPU))


def loss_and_gradients(model: CausalModel, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    model.module.zero_grad()
    laid_out = model.lay_out(batch)
    loss, _ = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.trained()}


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest distance of a gradient, measured by its norm (or, where that is tiny, by the largest norm)."""
    floor = 1e-3 * max(float(gradient.norm()) for gradient in theirs.values())
    return max(float((ours[name] - theirs[name]).norm()) / max(float(theirs[name].norm()), floor) for name in theirs)


def replaced(model: nn.Module) -> tuple[int, int, int]:
    own = [vars(part)["forward"] for part in model.modules() if "forward" in vars(part)]
    names = [type(getattr(forward, "__func__", forward)).__name__ for forward in own]
    return names.count("_NormForward"), names.count("_GatedForward"), names.count("function")


def test_what_is_recognised_of_each_family(any_model, model_folder):
    model = loaded(model_folder(any_model))
    assert replaced(model.module) == RECOGNISED.get(any_model, (0, 0, 0))
    assert replaced(loaded(model_folder(any_model), fast=False).module) == (0, 0, 0)


def test_losses_and_gradients_are_those_of_plain_transformers_and_peft(any_model, model_folder, tmp_path):
    """Document by document, the head on every position, in fp32, without the dropout that some families have of their own."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = model_folder(any_model)
    model = loaded(base)
    model.eval()
    ours = loss_and_gradients(model, BATCH)
    model.save(model.trained(), tmp_path, base_model=str(base))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path, is_trainable=True).eval()
    total = 0.0
    for document in one_by_one(BATCH):
        tokens, trained = torch.from_numpy(document.tokens), torch.from_numpy(document.trained)
        if trained.any():
            logits = plain(input_ids=tokens[None]).logits[0, :-1].float()
            loss = nn.functional.cross_entropy(logits[trained[1:]], tokens[1:][trained[1:]], reduction="sum")
            loss.backward()
            total += loss.item()
    theirs = {
        name.replace(".default", ""): parameter for name, parameter in plain.named_parameters() if parameter.requires_grad
    }
    assert ours[0] == pytest.approx(total, rel=1e-6)
    bare = {key.removeprefix("base_model.model.").removesuffix(".weight"): weight.grad for key, weight in theirs.items()}
    assert furthest(ours[1], {name: bare[name.removesuffix(".weight")] for name in ours[1]}) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral with a window", "gpt_neox", "cohere", "gpt2"])
def test_in_bf16_gradients_are_no_further_from_fp32_than_those_of_plain_operations(name, model_folder):
    """Rounding is all that differs: 5 % of a gradient's norm at most, and at most a quarter more than the plain path's."""
    exact = loss_and_gradients(loaded(model_folder(name), fast=False), BATCH)
    plain = loss_and_gradients(loaded(model_folder(name), precision="bf16", fast=False), BATCH)
    ours = loss_and_gradients(loaded(model_folder(name), precision="bf16"), BATCH)
    assert ours[0] == pytest.approx(exact[0], rel=5e-3)
    assert furthest(ours[1], exact[1]) < max(0.05, 1.25 * furthest(plain[1], exact[1]))


@pytest.mark.parametrize(("kind", "dropout"), [("dora", 0.0), ("rslora", 0.0), ("lora", 0.5)])
def test_other_adapters_have_the_same_gradients_on_both_paths(kind, dropout, model_folder):
    fast, plain = (loaded(model_folder("llama"), fast=fast, kind=kind, dropout=dropout) for fast in (True, False))
    ours, theirs = loss_and_gradients(fast, BATCH), loss_and_gradients(plain, BATCH)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert furthest(ours[1], theirs[1]) < 1e-4


def test_full_fine_tuning_has_the_same_gradients_on_both_paths(model_folder):
    for precision, tolerance in (("fp32", 1e-4), ("bf16", 0.05)):
        models = (load_whole(WantedModel(model_folder("qwen3"), precision, fast=fast), CPU) for fast in (True, False))
        ours, plain = (loss_and_gradients(model, BATCH) for model in models)
        assert ours[0] == pytest.approx(plain[0], rel=1e-6 if precision == "fp32" else 5e-3)
        assert furthest(ours[1], plain[1]) < tolerance


def test_gradient_checkpointing_changes_no_bit(model_folder):
    wanted = WantedModel(model_folder("llama"), "bf16", adapter=WantedAdapter("lora", 4, 8.0, 0.0, ()))
    kept, again = (
        loss_and_gradients(load_whole(dataclasses.replace(wanted, gradient_checkpointing=recompute), CPU), BATCH)
        for recompute in (False, True)
    )
    assert kept[0] == again[0]
    assert all(torch.equal(kept[1][name], again[1][name]) for name in kept[1])


def held_bytes(model: CausalModel) -> int:
    """Bytes that autograd keeps for the backward of the body, beside parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.module.parameters()}
    held = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor too: an address is not used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(model.lay_out(BATCH))
    return sum(size for size, _ in held.values())


def test_less_than_half_is_kept_for_the_backward(model_folder):
    fast, plain = (held_bytes(loaded(model_folder("llama"), precision="bf16", fast=fast)) for fast in (True, False))
    assert fast < 0.5 * plain


class _Norm(nn.Module):
    """A norm that could be taken for another one."""

    def __init__(self, change) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6
        self.change = change

    def forward(self, x):
        wide = x.float()
        return self.change(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps), self.weight).to(x.dtype)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight: weight * x.clamp(-2, 2),
        lambda x, weight: weight * (x - x.mean(-1, keepdim=True)),
        lambda x, weight: (2 + weight) * x,
        lambda x, weight: weight.detach() * x,
        lambda x, weight: weight * x * 1.001,
    ],
)
def test_a_norm_that_does_something_else_is_left_alone(change):
    assert norm_form(_Norm(lambda x, weight: weight * x), 1e-6) == "exact"
    assert norm_form(_Norm(change), 1e-6) is None
    assert norm_form(_Norm(lambda x, weight: weight * x), 1e-5) is None, "an epsilon that is not this one's"


class _Gate(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 8), nn.Linear(6, 8)
        self.down_proj = nn.Linear(8, 6)
        self.act_fn = nn.SiLU()
        self.change = change

    def forward(self, x):
        return self.change(self, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * m.up_proj(x).clamp(-50, 50)),
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * (m.up_proj(x) + 1)),
        lambda m, x: m.down_proj(m.act_fn(m.up_proj(x)) * m.gate_proj(x)),
        lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * m.up_proj(x)) + x,
        lambda m, x: m.down_proj(torch.relu(m.gate_proj(x)) * m.up_proj(x)),
    ],
)
def test_a_gated_layer_that_does_something_else_is_left_alone(change):
    assert gate_activation(_Gate(lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * m.up_proj(x)))) == "silu"
    assert gate_activation(_Gate(change)) is None


def apply_rotary_pos_emb(q, k, cos, sin):
    """Neighbours are rotated, not halves."""
    cos, sin = cos[:, None], sin[:, None]
    return tuple(x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin for x in (q, k))


def test_another_rotation_is_left_alone():
    def forward(q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)

    assert with_rotation(forward) is None


def test_what_has_a_forward_of_its_own_is_not_replaced(model_folder):
    """Somebody else has put something there."""
    model = load_model(model_folder("llama"), dtype="fp32", device=CPU, trainable=False, fast=False)
    norm = model.module.get_submodule(model.anatomy.final_norm)
    norm.forward = mine = lambda x: x
    replace_operations(model.module)
    assert norm.forward is mine
    del norm.forward
    assert replaced(model.module) == (4, 2, 2)
