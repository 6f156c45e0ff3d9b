from __future__ import annotations

import pytest

from fleetune.spec.errors import UserError
from fleetune.spec.given import flags_given
from fleetune.spec.read import resolve
from fleetune.spec.stages import RUNS_PER_RANK, Stage, runs_of_blocks


@pytest.mark.parametrize(("num_blocks", "num_runs"), [(30, 2), (7, 3), (5, 5), (1, 1), (100, 16)])
def test_runs_hold_every_block_once_and_are_as_even_as_can_be(num_blocks, num_runs):
    runs = runs_of_blocks(num_blocks, num_runs)
    assert [block for run in runs for block in run] == list(range(num_blocks))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert len(runs[-1]) == min(map(len, runs)), "the last run has the head and the loss besides"


def test_fewer_blocks_than_runs_are_refused():
    with pytest.raises(UserError, match="3 blocks, and they cannot be divided into 4 runs: give a smaller --pipeline"):
        runs_of_blocks(3, 4)


@pytest.mark.parametrize("schedule", RUNS_PER_RANK)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_stages_of_all_ranks_hold_every_run_once(schedule, num_ranks):
    stages = [Stage.of_rank(rank, num_ranks, schedule) for rank in range(num_ranks)]
    assert sorted(run for stage in stages for run in stage.own) == list(range(stages[0].num_runs))
    assert [stage.is_first for stage in stages] == [rank == 0 for rank in range(num_ranks)]
    assert [stage.is_last for stage in stages] == [rank == num_ranks - 1 for rank in range(num_ranks)]


@pytest.mark.parametrize("name", ["interleaved_zero_bubble", "ZBVZeroBubble"])
def test_zero_bubble_schedules_are_refused_with_the_reason(name):
    with pytest.raises(UserError) as error:
        resolve(flags=flags_given({"model": "m", "data": "d", "pipeline_schedule": name}))
    assert "is wrong there without a word: " in str(error.value) and "ive one of 1f1b, interleaved" in str(error.value)
    assert name in str(error.value)
