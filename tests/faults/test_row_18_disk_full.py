"""Row 18: the disk is full during a save: training goes on, a warning says it, the old checkpoint stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import SOURCE, Place
from journeys.journey import losses

#: In a mount namespace of its own: the checkpoints lie on a small disk, which is filled up and emptied again while it trains.
_SCRIPT = """
set -e
mkdir -p "$RUN"
mount -t tmpfs -o size=$SIZE tmpfs "$RUN"
"$@" &
pid=$!
while [ ! -e "$RUN/checkpoints/step-000004/manifest.json" ]; do kill -0 $pid; sleep 0.05; done
dd if=/dev/zero of="$RUN/checkpoints/filler" bs=4k 2>/dev/null || true
while ! grep -q save_failed "$RUN/events.jsonl"; do kill -0 $pid; sleep 0.05; done
ls "$RUN/checkpoints" > "$SEEN"
rm -f "$RUN/checkpoints/filler"
code=0; wait $pid || code=$?
cp -r "$RUN/." "$COPY"
exit $code
"""


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_stops_no_training(place: Place, golden: Callable[..., Path], tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    words = place.words(str(run), "--gpus", "2", "--checkpoint-every", "4")
    slow = [{"at": "backward", "count": 1, "do": "slow", "seconds": 0.1, "lasting": True}]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent / 'inject'}:{SOURCE}",
        "TEST_FAULTS": json.dumps(slow),
        "RUN": str(run),
        "SIZE": "3m",
        "SEEN": str(tmp_path / "seen"),
        "COPY": str(copy),
    }
    copy.mkdir()
    command = ["unshare", "-m", "sh", "-c", _SCRIPT, "sh", sys.executable, "-m", "fleetune.cli.main", *words]
    done = subprocess.run(command, cwd=place.folder, env=environment, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "could not be saved, training goes on" in done.stderr and "No space left" in done.stderr
    assert "step-000004" in (tmp_path / "seen").read_text(), "the old checkpoint did not survive"
    assert losses(copy) == losses(golden("--gpus", "2"))
