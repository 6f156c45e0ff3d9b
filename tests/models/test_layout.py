"""A packed micro-batch means the same as its documents one by one, in each layout, for each family."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fleetune.models.build import load_model
from fleetune.models.causal import CausalModel
from fleetune.models.layout import lay_out
from fleetune.models.objective import TokenLoss
from fleetune.spec.errors import UserError
from fleetune.spec.records import MicroBatch
from micro_batches import EMPTY, one_by_one, random_batch, train_all

CPU = torch.device("cpu")
#: Families whose attention can be told of documents, as far as this version of transformers goes.
FLAT = {
    *("llama", "mistral", "mixtral", "qwen3", "gpt2", "gpt_neox", "opt", "gptj", "gpt_oss", "phi", "gemma", "gemma2"),
    *("mistral with a window", "gpt_oss with windows", "opt with projections", "opt with the norm behind", "llama tied"),
    *("granite", "cohere", "bert as a decoder"),
}


def loaded(folder, **options) -> CausalModel:
    model = load_model(folder, dtype=torch.float32, device=CPU, trainable=True, **options)
    model.eval()
    return model


def loss_and_gradients(model: CausalModel, batches: list[MicroBatch]) -> tuple[float, int, dict[str, torch.Tensor]]:
    model.module.zero_grad()
    total, weight = 0.0, 0
    for batch in batches:
        laid_out = model.lay_out(batch)
        loss, count = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
        loss.backward()
        total, weight = total + loss.item(), weight + count
    return total, weight, {name: p.grad.clone() for name, p in model.trained() if p.grad is not None}


def worst(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_packed_documents_give_the_loss_and_the_gradients_of_the_documents_one_by_one(any_model, model_folder):
    model = loaded(model_folder(any_model))
    batch = random_batch([7, 12, 5, 33, 7, 2, 1, 19])
    packed = loss_and_gradients(model, [batch])
    alone = loss_and_gradients(model, one_by_one(batch))
    assert packed[1] == alone[1] == batch.num_trained_tokens
    assert packed[0] == pytest.approx(alone[0], rel=1e-6)
    assert worst(packed[2], alone[2]) < 1e-5
    scale = max(float(gradient.abs().max()) for gradient in packed[2].values())
    assert scale > 1e-2, "gradients too small for the comparison to mean anything"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_flat_layout_is_used_by_the_families_that_can_and_by_no_other(any_model, precision, model_folder):
    """Found by looking, and the rounding of a low precision does not mislead."""
    model = load_model(model_folder(any_model), dtype=precision, device=CPU, trainable=False)
    assert model.layout == ("flat" if any_model in FLAT else "documents"), model.traits.not_flat
    assert bool(model.traits.not_flat) == (any_model not in FLAT)


@pytest.mark.parametrize("name", sorted(FLAT))
def test_both_layouts_give_the_same_hidden_states(name, model_folder):
    model = loaded(model_folder(name))
    batch = train_all(random_batch([9, 30, 9, 4]))
    with torch.no_grad():
        flat = model.hidden(model.lay_out(batch))
        model.use_layout("documents")
        rows = model.hidden(model.lay_out(batch))
    assert torch.allclose(flat, rows, atol=2e-5), float((flat - rows).abs().max())


def test_a_poisoned_document_never_reaches_another_one(any_model, model_folder):
    """A token whose embedding is not a number stands in one document; its neighbours do not notice."""
    model = loaded(model_folder(any_model))
    batch = train_all(random_batch([11, 9, 6, 9]))
    with torch.no_grad():
        clean = model.hidden(model.lay_out(batch))
        poison = 299
        tokens = np.where(batch.tokens == poison, 298, batch.tokens)
        tokens[batch.document_bounds[1] + 2] = poison  # in the second document
        model.module.get_submodule(model.anatomy.embedding).weight[poison] = float("nan")
        poisoned = model.hidden(model.lay_out(dataclasses.replace(batch, tokens=tokens)))
    document = np.repeat(np.arange(4), [10, 8, 5, 8])
    touched = torch.isnan(poisoned).any(dim=1).numpy()
    assert touched[document == 1].any(), "the poison must work where it stands"
    assert not touched[document != 1].any()
    others = torch.from_numpy(document != 1)
    assert torch.allclose(poisoned[others], clean[others], atol=1e-5)


def test_an_empty_micro_batch_runs_with_weight_zero_and_gradients_of_zero(any_model, model_folder):
    model = loaded(model_folder(any_model))
    total, weight, gradients = loss_and_gradients(model, [EMPTY])
    assert (total, weight) == (0.0, 0)
    assert gradients, "the backward pass must run, for the collectives of other ranks"
    assert all(not gradient.any() for gradient in gradients.values())


def test_documents_without_a_trained_token_add_nothing(model_folder):
    model = loaded(model_folder("llama"))
    batch = random_batch([6, 5])
    total, weight, gradients = loss_and_gradients(model, [dataclasses.replace(batch, trained=np.zeros(11, dtype=bool))])
    assert (total, weight) == (0.0, 0)
    assert all(not gradient.any() for gradient in gradients.values())


def test_positions_restart_and_targets_follow_their_predecessors():
    batch = MicroBatch(
        step=0,
        number=0,
        sequences=(4, 9),
        tokens=np.array([10, 11, 12, 20, 21, 30]),
        trained=np.array([False, True, True, False, True, False]),
        document_bounds=np.array([0, 3, 5, 6]),
        sequence_bounds=np.array([0, 2, 3]),
        samples=("a", "b", "c"),
    )
    flat = lay_out(batch, "flat", CPU)
    assert flat.positions.tolist() == [[0, 1, 2, 0, 1, 0] + [0] * 26]
    assert flat.tokens.tolist() == [[10, 11, 12, 20, 21, 30] + [30] * 26]
    assert flat.select.tolist() == [0, 1, 3] and flat.targets.tolist() == [11, 12, 21]
    assert flat.origins.sequences.tolist() == [4, 4, 4, 4, 4] + [9] * 27
    assert flat.origins.positions.tolist() == [0, 1, 2, 3, 4] + [0] * 27
    rows = lay_out(batch, "documents", CPU)
    assert rows.tokens.tolist() == [[10, 11, 12], [20, 21, 21], [30, 30, 30]]
    assert rows.select.tolist() == [0, 1, 3] and rows.targets.tolist() == [11, 12, 21]
    assert rows.origins.positions.tolist() == [0, 1, 2, 3, 4, 4, 0, 0, 0]


def test_every_token_of_the_flat_row_is_attended_once_whatever_the_grouping():
    lengths = [40, 3, 3, 300, 40, 2, 1, 1, 39, 17, 64]
    laid_out = lay_out(random_batch(lengths), "flat", CPU)
    grouping = laid_out.grouping
    assert [(group.count, group.length) for group in grouping.groups] == [(4, 64), (6, 32), (1, 320)]
    assert sum(group.count * group.length for group in grouping.groups) == len(grouping.gather)
    assert grouping.num_tokens == sum(lengths) and laid_out.tokens.shape[1] == len(grouping.restore) == 512
    assert grouping.gather[grouping.restore[: sum(lengths)]].tolist() == list(range(sum(lengths)))
    real = set(range(len(grouping.gather))) - set(grouping.pads.tolist())
    assert real == set(grouping.restore[: sum(lengths)].tolist())


def test_few_shapes_come_of_many_lengths():
    """Each shape costs kernels that libraries make and keep."""
    rng = np.random.default_rng(0)
    laid_out = [lay_out(random_batch(rng.integers(1, 250, 5).tolist()), "flat", CPU) for _ in range(200)]
    assert len({row.tokens.shape for row in laid_out}) <= 40
    assert len({(group.count, group.length) for row in laid_out for group in row.grouping.groups}) <= 8 * 5


def test_long_documents_use_the_fused_attention_with_the_same_result(model_folder):
    """Documents beyond the length up to which matrix products are used, with and without a window."""
    for name in ("llama", "mistral with a window"):
        model = loaded(model_folder(name))
        batch = train_all(random_batch([280, 30]))
        with torch.no_grad():
            flat = model.hidden(model.lay_out(batch))
            model.use_layout("documents")
            rows = model.hidden(model.lay_out(batch))
        assert torch.allclose(flat, rows, atol=2e-5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_documents_that_would_change_each_others_rotary_frequencies_are_refused(kind, tmp_path):
    import tiny

    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 16}
    length = 64 if kind == "longrope" else 16
    model = loaded(tiny.write_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=length))
    for lengths in ([5, 16, 9], [40, 30]) if kind == "longrope" else ([5, 16, 9],):
        batch = train_all(random_batch(lengths))
        packed, alone = (loss_and_gradients(model, batches)[0] for batches in ([batch], one_by_one(batch)))
        assert packed == pytest.approx(alone, rel=1e-6)
    with pytest.raises(UserError, match="--sequence-length 16"):
        model.lay_out(random_batch([5, 40]))


def test_a_layout_that_a_family_cannot_do_is_refused(model_folder):
    model = loaded(model_folder("bloom"))
    with pytest.raises(ValueError, match="no flat layout"):
        model.use_layout("flat")
