"""Row 15: processes join while the run goes on, also while it saves or loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place
from journeys.journey import fleetune, losses


def resized(place: Place, name: str, processes: int) -> None:
    done = fleetune("resize", name, "--gpus", str(processes), cwd=place.folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("at", ["fsync", "load"])
def test_the_next_attempt_has_them_and_no_sample_is_lost(
    place: Place, golden: Callable[..., Path], tmp_path: Path, at: str
) -> None:
    count = 9 if at == "fsync" else 1
    slow = {"at": at, "count": count, "rank": 0, "do": "slow", "seconds": 3.0, "once": str(tmp_path / "once")}
    run = place.start("run", "--gpus", "2", faults=[slow])
    run.wait((tmp_path / "once").exists)
    resized(place, run.name, 3)
    assert run.end(240) == 0
    assert [(row["before"], row["after"]) for row in run.events("resize")] == [(2, 3)]
    assert run.account()["recomputed_steps"] == 0 and not run.events("failure")
    assert [row["num_processes"] for row in run.events("start") if "num_processes" in row] == [2, 3]
    reference = golden("--gpus", "2")
    run.holds_to(reference, bitwise=False)
    mine, theirs = ([float.fromhex(loss) for loss in losses(path)] for path in (run.path, reference))
    assert mine == pytest.approx(theirs, rel=1e-4)
