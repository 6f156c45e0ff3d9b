"""Row 2: kill -9 of two workers at once, and of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place


@pytest.mark.long
@pytest.mark.parametrize(("processes", "ranks"), [(2, (0, 1)), (4, (1, 3)), (4, (0, 1, 2, 3))])
def test_several_at_once(place: Place, golden: Callable[..., Path], processes: int, ranks: tuple[int, ...]) -> None:
    run = place.start("run", "--gpus", str(processes))
    workers = run.wait_workers(processes)
    run.wait_step(17)
    run.kill(*(workers[rank] for rank in ranks))
    assert run.end(240) == 0
    assert run.failed("SIGKILL")["rank"] in ranks
    assert len(run.events("failure")) == 1
    run.recovered_within(15 if processes == 2 else 25)
    run.holds_to(golden("--gpus", str(processes)))
