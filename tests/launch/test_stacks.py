from __future__ import annotations

from pathlib import Path

from fleetune.launch.stacks import sizes_of, waiting_ranks, waits_for_others

WAITING = """Thread 0x00007f5 (most recent call first):
  File "/x/threading.py", line 324 in wait

Current thread 0x00007f6 (most recent call first):
  File "/site/torch/distributed/distributed_c10d.py", line 2909 in all_reduce
  File "/site/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/src/fleetune/parallel/world.py", line 120 in sum_tensor
"""
LOOPING = """Thread 0x00007f5 (most recent call first):
  File "/x/threading.py", line 324 in wait

Current thread 0x00007f6 (most recent call first):
  File "/site/model.py", line 1 in forward
  File "/site/model.py", line 2 in call
  File "/site/model.py", line 3 in call
  File "/site/model.py", line 4 in call
  File "/site/torch/distributed/fsdp/wrap.py", line 5 in call
"""


def test_a_rank_in_a_collective_waits_and_one_that_computes_under_a_wrapper_does_not() -> None:
    assert waits_for_others(WAITING)
    assert not waits_for_others(LOOPING)


def test_only_the_stacks_written_now_count(tmp_path: Path) -> None:
    logs = {rank: tmp_path / f"{rank}.log" for rank in range(3)}
    logs[0].write_text(WAITING)
    before = sizes_of(logs)
    assert before == {0: len(WAITING), 1: 0, 2: 0}
    logs[0].write_text(WAITING + LOOPING)
    logs[1].write_text(WAITING)
    assert waiting_ranks(logs, before, range(3)) == {1}
