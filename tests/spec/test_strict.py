"""What strict determinism asks of the spec: the same division of a step for any world, and no change of it on resume."""

from __future__ import annotations

import pytest

from fleetune.planning.combinations import Asked, refusals
from fleetune.planning.plan import divide_step
from fleetune.spec.errors import UserError
from fleetune.spec.given import flags_given
from fleetune.spec.layout import Layout
from fleetune.spec.read import Resolved, resolve
from fleetune.spec.resume import check_resume


def resolved(**flags: object) -> Resolved:
    return resolve(flags=flags_given({"model": "m", "data": "d", **flags}))


def test_the_micro_batch_that_nobody_gives_is_the_same_for_any_number_of_processes():
    spec = resolved(determinism="strict", sequence_length=64, global_batch_size=16).spec
    sizes = {divide_step(spec, Layout(replicate=ranks)).micro_batch_size for ranks in (1, 2, 3, 4, 8)}
    assert len(sizes) == 1
    loose = resolved(sequence_length=64, global_batch_size=16).spec
    assert divide_step(loose, Layout()).micro_batch_size != divide_step(loose, Layout(replicate=4)).micro_batch_size


@pytest.mark.parametrize("name, value", [("micro_batch_size", 4), ("threads", 2), ("gradient_checkpointing", True)])
def test_what_changes_the_last_bits_stays_on_resume(name: str, value: object):
    before = resolved(determinism="strict", micro_batch_size=2, threads=1)
    after = resolved(determinism="strict", **{"micro_batch_size": 2, "threads": 1, name: value})
    with pytest.raises(UserError, match=f"{name} was .* when the run began"):
        check_resume(before, after)
    loose = [resolved(micro_batch_size=2, threads=1), resolved(**{"micro_batch_size": 2, "threads": 1, name: value})]
    assert check_resume(*loose) == ()
    with pytest.raises(UserError, match="determinism was"):
        check_resume(before, resolved(micro_batch_size=2, threads=1))


def test_more_threads_and_models_in_pieces_are_refused_with_the_reason():
    spec = resolved(determinism="strict", threads=2).spec
    (problem,) = refusals(Asked(spec, Layout(replicate=2), "replicated", "cpu"))
    assert "threads 2" in problem and "last bits" in problem and "--threads" in problem
    assert not refusals(Asked(spec, Layout(replicate=2), "replicated", "cuda"))
    spec = resolved(determinism="strict").spec
    (problem,) = refusals(Asked(spec, Layout(shard=2), "sharded", "cpu"))
    assert "shard 2" in problem and "order" in problem and "--shard" in problem
    assert not refusals(Asked(spec, Layout(replicate=4), "replicated", "cpu"))
