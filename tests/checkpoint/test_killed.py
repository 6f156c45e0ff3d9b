from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.layouts import rows_of, same_tensors, training_state, void
from fleetune.checkpoint.store import CheckpointStore
from fleetune.spec.records import Shard


def save_as_rank(folder: Path, rank: int, barrier: Any, patience: float, step: int, dies: bool) -> None:
    """One rank in a process of its own; one that dies ends while it makes its shards, as kill -9 would end it."""

    def shards() -> Iterator[Shard]:
        for number, shard in enumerate(rows_of(training_state(step), rank, 2)):
            if dies and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield shard

    store = CheckpointStore(folder, rank=rank, world_size=2, barrier=lambda: void(barrier.wait(patience)), file_bytes=100)
    os._exit(0 if store.save(step, shards(), {}).error is None else 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("dead_rank", [0, 1])
def test_ranks_in_processes_save_together_and_one_that_is_killed_leaves_the_older_checkpoint(
    tmp_path: Path, dead_rank: int
) -> None:
    context = multiprocessing.get_context("fork")
    for step, dies in ((1, False), (2, True)):
        barrier = context.Barrier(2)
        ranks = [
            context.Process(
                target=save_as_rank, args=(tmp_path, rank, barrier, 1 if dies else 20, step, dies and rank == dead_rank)
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(30)
        codes = [rank.exitcode for rank in ranks]
        assert codes == ([0, 0] if not dies else [-9, 1] if dead_rank == 0 else [1, -9])
        latest = CheckpointStore(tmp_path).latest()
        assert latest is not None and latest.step == 1 and same_tensors(latest, training_state(1))
    assert len(list(tmp_path.iterdir())) == 2, "what the dead have left lies there until the next save"
    assert CheckpointStore(tmp_path).save(3, rows_of(training_state(3), 0, 1), {}).error is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    source = random.Random(0)
    tensors = [training_state(seed) for seed in range(2)]
    CheckpointStore(tmp_path).save(1, rows_of(tensors[1], 0, 1), {})
    started = time.monotonic()
    step, steps_seen = 2, set()
    # On a busy machine a save takes longer than the time until the kill: go on until several have been whole.
    while time.monotonic() - started < 2 or (len(steps_seen) <= 5 and time.monotonic() - started < 60):
        child = os.fork()
        if child == 0:
            try:
                store = CheckpointStore(tmp_path, keep=1)
                while True:
                    store.save(step, rows_of(tensors[step % 2], 0, 1), {})
                    step += 1
            finally:
                os._exit(1)
        time.sleep(source.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = CheckpointStore(tmp_path)
        latest = store.latest()
        assert latest is not None and same_tensors(latest, tensors[latest.step % 2])
        assert store.refused == []
        steps_seen.add(latest.step)
        step = latest.step + 1
    assert len(steps_seen) > 5
    assert CheckpointStore(tmp_path, keep=1).save(step, rows_of(tensors[0], 0, 1), {}).error is None
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:06d}"]
