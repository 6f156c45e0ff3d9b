from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from checkpoint.layouts import rows_of, same_tensors, training_state
from fleetune.checkpoint.store import CheckpointStore


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    source = random.Random(0)
    tensors = [training_state(seed) for seed in range(2)]
    CheckpointStore(tmp_path).save(1, rows_of(tensors[1], 0, 1), {})
    started = time.monotonic()
    step, steps_seen = 2, set()
    while time.monotonic() - started < 2:
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
