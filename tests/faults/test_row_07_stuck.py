"""Row 7: Python's lock is held by a call that does not return; or a call in C does not return without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import Place


@pytest.mark.long
@pytest.mark.parametrize(("do", "word"), [("hold", "no sign of life"), ("regex", "no sign of life"), ("loop", "no progress")])
def test_the_watch_outside_the_process_ends_it(
    place: Place, golden: Callable[..., Path], tmp_path: Path, do: str, word: str
) -> None:
    fault = {"at": "backward", "count": 25, "rank": 1, "do": do, "once": str(tmp_path / "once")}
    run = place.start("run", "--gpus", "2", faults=[fault])
    assert run.end() == 0
    failure = run.failed(word, rank=1)
    assert 8 < failure["detection_s"] < 25
    log = Path(failure["log"]).read_text()
    assert "sitecustomize.py" in log, "the stack that hangs is not in its log"
    run.recovered_within(15)
    run.holds_to(golden("--gpus", "2"))
