"""Attention of the flat row against softmax(q k) v of each document alone, in fp64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fleetune.models.grouped_attention import attend_grouped
from fleetune.models.layout import lay_out
from micro_batches import random_batch

CPU = torch.device("cpu")
SCALING = 0.3
#: Several of one rounded length, one of a single token, and two longer than a tile.
LENGTHS = [7, 40, 300, 1, 700, 33, 12]


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], window: int | None) -> torch.Tensor:
    folded = q.shape[1] // k.shape[1]
    outputs = []
    for start, end in itertools.pairwise(bounds):
        keys, values = (x[start:end].repeat_interleave(folded, dim=1) for x in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = (distance < 0) | (distance >= (window or math.inf))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * SCALING
        outputs.append(torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, -math.inf).softmax(-1), values))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 2, 6, 300])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
def test_output_and_gradients_are_those_of_each_document_alone(heads, dtype, tolerance, window):
    batch = random_batch(LENGTHS)
    laid_out = lay_out(batch, "flat", CPU)
    tokens, slots = batch.num_tokens, laid_out.tokens.shape[1]
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads[0], 16), (heads[1], 16), (heads[1], 8))
    q, k, v = (torch.randn(slots, *size, generator=generator).to(dtype).requires_grad_() for size in sizes)
    y = attend_grouped(q, k, v, laid_out.grouping, scaling=SCALING, window=window)
    d_y = torch.randn(y.shape, generator=generator).to(dtype)
    d_y[tokens:] = 0
    exact = [x.detach().double()[:tokens].requires_grad_() for x in (q, k, v)]
    wanted = one_by_one(*exact, batch.document_bounds.tolist(), window)
    assert float((y[:tokens] - wanted).detach().abs().max()) < tolerance * float(wanted.detach().abs().max())
    ours = torch.autograd.grad(y, (q, k, v), d_y)
    for own, other in zip(ours, torch.autograd.grad(wanted, exact, d_y[:tokens].double())):
        assert float((own[:tokens] - other).abs().max()) < tolerance * float(other.abs().max())
        assert not own[tokens:].any(), "slots without a token have no gradient"


def test_probabilities_are_kept_for_short_documents_alone():
    """What a long document keeps grows with its length, not with the square of it."""
    kept = {}
    for length in (256, 1024, 2048):
        laid_out = lay_out(random_batch([length]), "flat", CPU)
        q, k, v = (torch.randn(length, heads, 8).requires_grad_() for heads in (4, 2, 2))
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):  # noqa: B023
            attend_grouped(q, k, v, laid_out.grouping, scaling=SCALING, window=None)
        kept[length] = sum(sizes)
    inputs = 8 * 8  # of a token
    assert kept[256] == 256 * inputs + 4 * 256 * 256
    assert kept[1024] == 1024 * inputs and kept[2048] == 2048 * inputs
