"""Strict determinism: the number of ranks changes no bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from fleetune.parallel.ordered import OrderedSum, combine
from fleetune.parallel.world import Place, World
from parallel import cases
from parallel.ranks import Ranks


def leaves(count: int) -> list[torch.Tensor]:
    """Values of very different size: another order of additions gives other bits."""
    random = torch.Generator().manual_seed(count)
    return [torch.randn(50, generator=random) * 10.0 ** (number % 7) for number in range(count)]


def by_tree(values: list[torch.Tensor]) -> torch.Tensor:
    """The definition: neighbours in pairs, then pairs of pairs, to the end; who has no neighbour goes on as it is."""
    while len(values) > 1:
        pairs = itertools.zip_longest(values[::2], values[1::2])
        values = [left if right is None else left + right for left, right in pairs]
    return values[0]


def partial_sums(values: list[torch.Tensor], first: int, last: int) -> dict:
    """What a rank with the micro-batches from `first` to before `last` hands out."""
    summed = OrderedSum(torch.zeros(50), World(Place(), torch.device("cpu")))
    for number in range(first, last):
        summed._buffer.copy_(values[number])
        summed._push((number, 1))
        assert not summed._buffer.any()
    return dict(summed._nodes)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 13])
def test_any_division_into_runs_gives_the_tree_to_the_last_bit(count: int):
    expected = by_tree(leaves(count))
    for num_cuts in range(min(count, 4)):
        for cuts in itertools.combinations(range(1, count), num_cuts):
            nodes = {}
            for first, last in itertools.pairwise([0, *cuts, count]):
                part = partial_sums(leaves(count), first, last)
                assert len(part) <= 2 * (last - first).bit_length()
                nodes |= part
            assert torch.equal(combine(nodes, count), expected), cuts


def test_a_micro_batch_that_nobody_has_is_an_error():
    values = leaves(5)
    with pytest.raises(ValueError, match="micro-batch 3 of 5 belongs to no rank"):
        combine({**partial_sums(values, 0, 3), **partial_sums(values, 4, 5)}, 5)


def test_one_two_and_three_ranks_have_the_same_losses_and_weights_to_the_last_bit(ranks: Ranks, tiny_llama: Path):
    told = {world_size: ranks.run(cases.strict_steps, world_size, str(tiny_llama), 4) for world_size in (1, 2, 3)}
    alone = told[1][0]
    assert alone["bits"] == alone["bits_on_rank_0"]
    for world_size, everybody in told.items():
        for rank in everybody:
            assert {name: rank[name] for name in alone if name != "loose"} == {
                name: alone[name] for name in alone if name != "loose"
            }, f"{world_size} ranks"
    for strict, loose in zip(alone["rows"], alone["loose"]):
        assert [float.fromhex(value) for value in strict] == pytest.approx(loose, rel=1e-5)
