"""Rows 25 and 27 at the engine: a gradient that is not finite on one rank, and single bits of one rank's state."""

from __future__ import annotations

from typing import Any

import pytest

from parallel import cases
from parallel.ranks import Ranks


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_is_not_finite_on_one_rank_touches_nothing_on_any(ranks: Ranks, world_size: int):
    told: list[dict[str, Any]] = ranks.run(cases.one_rank_has_a_bad_gradient, world_size)
    assert all(rank["applied"] == [True, False, True] for rank in told)
    assert all(rank["finite_loss"] and rank["unchanged"] and rank["as_if_it_had_not_been"] for rank in told)
    assert all(rank["culprits"] == told[0]["culprits"] for rank in told)
    assert f"rank {world_size - 1}, micro-batch" in told[0]["culprits"][0] and "gradient norm nan" in told[0]["culprits"][0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_bit_of_weights_or_optimizer_state_changes_the_hash_of_one_rank(ranks: Ranks, world_size: int):
    told = ranks.run(cases.flipped_bits, world_size)
    assert all(rank["before"] == told[0]["before"] for rank in told)
    others, flipped = told[:-1], told[-1]
    assert all(set(rank["after"]) == {rank["before"]} for rank in others)
    assert flipped["before"] not in flipped["after"] and len(set(flipped["after"])) == len(flipped["after"])
    for rank, seen in enumerate(told):
        if world_size == 2:
            assert all("ranks 0 (node 0), 1 (node 0) differ" in text for text in seen["said"]), rank
        else:
            assert all(text.startswith("rank 2 (node 0) differs from the other 2 replicas") for text in seen["said"]), rank
