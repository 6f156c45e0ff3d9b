"""Row 1: kill -9 of one worker, each rank, in each phase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import PATIENCE, Place

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long


def test_a_killed_worker_of_two_is_found_in_a_second_and_nothing_is_lost(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run", "--gpus", "2")
    workers = run.wait_workers(2)
    run.wait_step(10)
    killed_at = run.kill(workers[1])
    assert run.end() == 0
    failure = run.failed("SIGKILL", rank=1)
    assert failure["time"] - killed_at < 1.0 * PATIENCE + 3.0, "its peer, too, gets three seconds to end by itself"
    assert failure["detection_s"] < 1.0 * PATIENCE
    run.recovered_within(15)
    run.holds_to(golden("--gpus", "2"))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_each_rank_of_four(place: Place, golden: Callable[..., Path], rank: int) -> None:
    run = place.start("run", "--gpus", "4")
    workers = run.wait_workers(4)
    run.wait_step(10 + 5 * rank)
    run.kill(workers[rank])
    assert run.end(240) == 0
    run.failed("SIGKILL", rank=rank)
    run.recovered_within(25)
    run.holds_to(golden("--gpus", "4"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "count"), [("backward", 23), ("fsync", 9), ("rename", 2), ("load", 1)], ids=["backward", "fsync", "rename", "load"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_in_each_phase(place: Place, golden: Callable[..., Path], tmp_path: Path, at: str, count: int, rank: int) -> None:
    fault = {"at": at, "count": count, "rank": rank, "do": "kill", "once": str(tmp_path / "once")}
    run = place.start("run", "--gpus", "2", faults=[fault])
    assert run.end() == 0
    assert (tmp_path / "once").exists(), "the fault never happened"
    run.failed("SIGKILL", rank=rank)
    run.holds_to(golden("--gpus", "2"))


@pytest.mark.long
@pytest.mark.parametrize("flags", [("--method", "full"), ("--precision", "bf16")], ids=["full", "bf16"])
def test_the_same_for_full_fine_tuning_and_in_bf16(place: Place, golden: Callable[..., Path], flags: tuple[str, ...]) -> None:
    run = place.start("run", "--gpus", "2", *flags)
    workers = run.wait_workers(2)
    run.wait_step(20)
    run.kill(workers[0])
    assert run.end() == 0
    run.holds_to(golden("--gpus", "2", *flags))


@pytest.mark.long
def test_the_only_worker_of_a_run(place: Place, golden: Callable[..., Path]) -> None:
    run = place.start("run")
    workers = run.wait_workers(1)
    run.wait_step(10)
    run.kill(workers[0])
    assert run.end() == 0
    run.failed("SIGKILL", rank=0)
    run.recovered_within(15)
    run.holds_to(golden())
