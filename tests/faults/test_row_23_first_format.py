"""Row 23: a checkpoint that an older release has written. `first_format/` holds the model, the rows and the run folder of a run
that was cut off after its sixth step of twelve, as the first format (version 1) wrote it; its ledger has all twelve losses,
also those that it made after the cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fleetune.checkpoint.store import CheckpointStore
from fleetune.training.progress import Progress
from journeys.journey import fleetune, losses, samples

STORED = Path(__file__).resolve().parent / "first_format"
CUT_OFF = 6
LAST = 12


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy whose `run.yaml` names the places of the copy."""
    folder = tmp_path / "old"
    shutil.copytree(STORED, folder)
    run_yaml = folder / "run" / "run.yaml"
    run_yaml.write_text(run_yaml.read_text(encoding="utf-8").replace("@FOLDER@", str(folder)), encoding="utf-8")
    return folder


def test_its_tensors_and_its_state_are_read(old: Path) -> None:
    store = CheckpointStore(old / "run" / "checkpoints")
    checkpoint = store.latest()
    assert checkpoint is not None and checkpoint.step == CUT_OFF and store.refused == []
    progress = Progress(**checkpoint.state)
    assert (progress.step, progress.next_sequence, progress.num_steps) == (CUT_OFF, 4 * CUT_OFF, LAST)
    roles = {tensor.role for tensor in checkpoint.tensors()}
    assert {"parameter", "exp_avg", "exp_avg_sq"} <= roles, roles


@pytest.mark.long
def test_a_run_goes_on_from_it_with_the_losses_of_then(old: Path) -> None:
    then, ledger = old / "then", old / "run" / "ledger.jsonl"
    then.mkdir()
    rows = ledger.read_text(encoding="utf-8").splitlines()
    (then / "ledger.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    ledger.write_text("\n".join(rows[:CUT_OFF]) + "\n", encoding="utf-8")
    done = fleetune("train", "--run", "run", "--resume", cwd=old)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (old / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["from_step"] for row in events if "from_step" in row] == [0, CUT_OFF]
    assert samples(old / "run") == samples(then)
    mine, theirs = ([float.fromhex(loss) for loss in losses(run)] for run in (old / "run", then))
    # Another processor or another torch takes sums in another order.
    assert len(mine) == LAST and mine == pytest.approx(theirs, rel=1e-4)
    verified = fleetune("verify", "run", cwd=old)
    assert verified.returncode == 0 and f"lost 0, repeated 0, {LAST} steps" in verified.stdout, verified.stdout

    (old / "run" / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events if row.get("from_step") != 0))
    refused = fleetune("verify", "run", cwd=old)
    assert refused.returncode == 2 and "does not tell how the run began" in refused.stderr and "--against" in refused.stderr
