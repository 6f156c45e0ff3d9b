"""Row 26: a loss spike, from a row that nothing else in the data is like. The detector fires; what then is the policy's."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.poison import events_of, gibberish, ledger_of, steps_with, write_rows
from fleetune.training.spikes import MIN_MEMORY, find_spike
from journeys.journey import SMALL, fleetune, losses

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

ROW = 41
WORDS = [*SMALL, "--data", "rows.jsonl", "--method", "full", "--precision", "fp32", "--epochs", "2", "--gpus", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("row-26")
    write_rows(folder / "rows.jsonl", 96, {ROW - 1: gibberish()})
    return folder


@pytest.mark.long
def test_a_spike_is_told_and_with_rewind_the_steps_around_it_are_left_out(place: Path, tiny_llama: Path):
    words = ["train", "--model", tiny_llama, *WORDS, "--checkpoint-every", "5"]
    done = fleetune(*words, "--run", "told", cwd=place)
    assert done.returncode == 0, done.stderr
    bad = [step for step in steps_with(place / "told", ROW) if step > MIN_MEMORY + 1]
    told = [row["step"] for row in events_of(place / "told", "spike")]
    assert bad and bad[0] in told, "the row that nobody can foresee was not noticed"
    assert all(row["applied"] for row in ledger_of(place / "told").values())

    done = fleetune(*words, "--run", "back", "--on-spike", "rewind", cwd=place)
    assert done.returncode == 0, done.stderr
    rewinds = events_of(place / "back", "rewind")
    ledger = ledger_of(place / "back")
    assert rewinds and rewinds[0]["step"] == told[0] and rewinds[0]["tries"] == 1
    first, last = rewinds[0]["left_out"]
    assert last == told[0] and first == last - 3 and rewinds[0]["to_step"] < first
    assert all(ledger[step]["applied"] is False and "far above" in ledger[step]["left_out"] for step in range(first, last + 1))
    before = slice(0, first - 1)
    assert losses(place / "back")[before] == losses(place / "told")[before], "what was done again is not the same"
    verified = fleetune("verify", "back", cwd=place)
    assert verified.returncode == 0 and "lost 0, repeated 0" in verified.stdout


@pytest.mark.long
def test_rewinds_are_bounded(place: Path, tmp_path: Path, tiny_llama: Path):
    """Five rows in five neighbouring steps that no window of 1, 2 or 4 steps holds: the fourth time the run ends."""
    words = ["train", "--model", tiny_llama, *WORDS, "--micro-batch-size", "1", "--checkpoint-every", "2", "--skip-window", "1"]
    every_tenth = {row: gibberish() for row in range(0, 96, 10)}
    write_rows(tmp_path / "rows.jsonl", 96, every_tenth)
    done = fleetune(*words, "--on-spike", "rewind", "--max-steps", "200", "--run", "often", cwd=tmp_path)
    rewinds = events_of(tmp_path / "often", "rewind")
    tries = [row["tries"] for row in rewinds]
    assert tries == sorted(tries)[: len(tries)] and max(tries, default=0) <= 3
    assert (done.returncode == 2 and "3 times" in done.stderr) or len(rewinds) < 4


def test_ordinary_noise_is_no_spike_and_a_jump_is():
    noise = [2.0 + 0.3 * (-1) ** step * (step % 7) / 7 for step in range(64)]
    assert find_spike(2.9, 1.0, noise, [0.0] * 64) is None
    assert "loss 6" in str(find_spike(6.0, 1.0, noise, [0.0] * 64))
    assert "gradient norm 1e+04" in str(find_spike(2.0, 1e4, noise, [0.0] * 64))
    assert find_spike(1e9, 1e9, noise[: MIN_MEMORY - 1], [0.0] * (MIN_MEMORY - 1)) is None, "too little is known to tell"
