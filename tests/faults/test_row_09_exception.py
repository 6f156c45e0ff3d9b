"""Row 9: an exception on one rank in the middle of the backward pass; no rank hangs in its clean-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import PATIENCE, Place


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 0])
def test_all_end_at_once_and_the_first_traceback_names_the_cause(
    place: Place, golden: Callable[..., Path], tmp_path: Path, rank: int
) -> None:
    fault = {"at": "backward", "count": 25, "rank": rank, "do": "raise", "once": str(tmp_path / "once")}
    run = place.start("run", "--gpus", "2", faults=[fault])
    run.wait((tmp_path / "once").exists)
    happened_at = (tmp_path / "once").stat().st_mtime
    assert run.end() == 0
    failure = run.failed("RuntimeError: the injected fault", rank=rank)
    assert failure["time"] - happened_at < 5 * PATIENCE
    assert "the injected fault" in Path(failure["log"]).read_text()
    run.recovered_within(15)
    run.holds_to(golden("--gpus", "2"))
