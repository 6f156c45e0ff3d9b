from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetune.monitor.ledger import check, compare, read_chain
from fleetune.monitor.monitor import Monitor
from fleetune.spec.run_folder import RunFolder

Make = Callable[..., RunFolder]


def samples_of(step: int, *, epoch_steps: int = 1000) -> list[str]:
    """Four rows a step; after `epoch_steps` the same rows come again, in another order."""
    epoch, place = divmod(step - 1, epoch_steps)
    if epoch % 2:
        place = epoch_steps - 1 - place
    return [f"train:{4 * place + row}" for row in range(4)]


def loss_of(step: int) -> float:
    return 3.0 / step


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A run of attempts, each (first step, last step), written through the monitor."""

    def make_run(
        *attempts: tuple[int, int],
        samples: Callable[[int], list[str]] = samples_of,
        loss: Callable[[int], float] = loss_of,
    ) -> RunFolder:
        run = RunFolder(tmp_path / f"run {len(list(tmp_path.iterdir()))}")
        run.create()
        for attempt, (first, last) in enumerate(attempts):
            with Monitor(run, attempt=attempt) as monitor:
                for step in range(first, last + 1):
                    monitor.commit(
                        {
                            "step": step,
                            "samples": samples(step),
                            "trained_tokens": 100,
                            "loss_hex": loss(step).hex(),
                            "gradient_norm_hex": (1.0).hex(),
                            "applied": True,
                        }
                    )
        return run

    return make_run


def test_a_run_that_was_killed_and_resumed_twice_equals_the_undisturbed_one(make: Make) -> None:
    comparison = compare(make((1, 13), (11, 17), (11, 30)), make((1, 30)))
    assert comparison.holds and comparison.bitwise and comparison.num_common_steps == 30
    assert comparison.text() == "lost 0, repeated 0, losses bitwise"
    assert comparison.first_difference_step is None and comparison.max_relative_difference == 0.0


def test_steps_that_a_later_attempt_never_reached_again_do_not_count(make: Make) -> None:
    chain = read_chain(make((1, 30), (21, 25)).ledger)
    assert list(chain.rows) == list(range(1, 26)) and chain.redone == 10
    assert compare(make((1, 30), (21, 25)), make((1, 30))).lost == 20


def test_samples_that_were_skipped_and_repeated_after_a_resume_are_counted(make: Make) -> None:
    golden = make((1, 20))
    skipping = compare(make((1, 20), samples=lambda step: samples_of(step if step <= 10 else step + 1)), golden)
    assert (skipping.lost, skipping.repeated, skipping.holds) == (4, 4, False)
    assert skipping.text() == "lost 4, repeated 4, losses bitwise"
    repeating = compare(make((1, 20), samples=lambda step: samples_of(step if step <= 10 else step - 1)), golden)
    assert (repeating.lost, repeating.repeated) == (4, 4)


def test_the_same_samples_in_other_steps_are_not_the_same_run(make: Make) -> None:
    swapped = {5: 6, 6: 5}
    comparison = compare(make((1, 20), samples=lambda step: samples_of(swapped.get(step, step))), make((1, 20)))
    assert (comparison.lost, comparison.repeated, comparison.moved) == (0, 0, 8)
    assert not comparison.holds and comparison.text() == "lost 0, repeated 0, moved 8, losses bitwise"


def test_losses_that_differ_are_measured_and_the_first_step_is_named(make: Make) -> None:
    comparison = compare(make((1, 9), loss=lambda step: loss_of(step) * (1 + 1e-6 * (step > 6))), make((1, 9)))
    assert comparison.holds and not comparison.bitwise and comparison.first_difference_step == 7
    assert comparison.max_relative_difference == pytest.approx(1e-6, rel=1e-3)
    assert comparison.text().startswith("lost 0, repeated 0, max relative difference 1e-06 (first in step 7)")


def test_one_bit_of_one_loss_is_a_difference(make: Make) -> None:
    def one_bit_more_in_step_4(step: int) -> float:
        return math.nextafter(loss_of(step), 9) if step == 4 else loss_of(step)

    comparison = compare(make((1, 9), loss=one_bit_more_in_step_4), make((1, 9)))
    assert not comparison.bitwise and comparison.first_difference_step == 4 and 0 < comparison.max_relative_difference < 1e-15
    zeros = compare(make((1, 2), loss=lambda step: -0.0), make((1, 2), loss=lambda step: 0.0))
    assert not zeros.bitwise
    strange = compare(make((1, 2), loss=lambda step: float("nan")), make((1, 2)))
    assert strange.max_relative_difference == float("inf")


def test_a_run_that_ended_early_has_lost_the_rest(make: Make) -> None:
    comparison = compare(make((1, 15)), make((1, 20)))
    assert comparison.lost == 20 and comparison.repeated == 0 and comparison.bitwise and not comparison.holds
    nothing = compare(make(), make((1, 2)))
    assert nothing.text() == "lost 8, repeated 0, no common step" and not nothing.bitwise


def test_a_run_alone_holds_when_its_steps_follow_each_other(make: Make) -> None:
    result = check(make((1, 13), (11, 30)), num_steps=30)
    assert result.holds and result.text() == "lost 0, repeated 0, 30 steps in 2 attempts, 3 done again"


def test_missing_steps_are_named(make: Make) -> None:
    result = check(make((1, 5), (8, 10)), num_steps=12)
    assert not result.holds and "4 steps are missing in the ledger: 6 to 7, 11 to 12" in result.text()
    late = check(make((3, 5)))
    assert "2 steps are missing in the ledger: 1 to 2" in late.text()


def test_by_the_plan_lost_and_repeated_samples_are_counted_exactly(make: Make) -> None:
    assert check(make((1, 20)), expected=samples_of, num_steps=20).holds
    skipping = make((1, 20), samples=lambda step: samples_of(step if step <= 10 else step + 1))
    result = check(skipping, expected=samples_of, num_steps=20)
    assert (result.lost, result.repeated) == (4, 4) and not result.holds
    stopped = check(make((1, 18)), expected=samples_of, num_steps=20)
    assert stopped.lost == 8 and stopped.text().startswith("lost 8, repeated 0")
    backwards = make((1, 20), samples=lambda step: samples_of(21 - step))
    assert "80 samples were not trained in the place" in check(backwards, expected=samples_of).text()


def test_each_sample_comes_once_an_epoch(make: Make) -> None:
    def epochs_of_five(step: int) -> list[str]:
        return samples_of(step, epoch_steps=5)

    assert check(make((1, 13), samples=epochs_of_five), samples_per_epoch=20).holds
    assert check(make((1, 13), samples=epochs_of_five)).holds

    def repeats_a_step(step: int) -> list[str]:
        return epochs_of_five(3 if step == 4 else step)

    result = check(make((1, 13), samples=repeats_a_step), samples_per_epoch=20)
    assert result.repeated >= 4 and not result.holds
    within_first = check(make((1, 10), samples=lambda step: samples_of(step if step <= 7 else step - 1)))
    assert within_first.repeated == 4, "a step done twice in the first epoch"


def test_rows_that_are_damaged_or_come_from_a_replaced_attempt_do_not_count_and_are_told(make: Make) -> None:
    run = make((1, 5), (4, 8))
    zombie = {"version": 1, "attempt": 0, "step": 6, "samples": ["train:999"], "loss_hex": "0x1p+0"}
    strange: list[Any] = [
        zombie,
        {"attempt": 1, "step": "9", "loss_hex": "0x1p+0"},
        {"attempt": 1, "step": 9, "samples": ["a"], "loss_hex": "zz"},
    ]
    with open(run.ledger, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in strange)
        file.write('{"version": 1, "attempt": 1, "step": 9, "sam')
    chain = read_chain(run.ledger)
    assert list(chain.rows) == list(range(1, 9)) and chain.rows[6]["samples"] == samples_of(6)
    result = check(run)
    assert not result.holds and "3 rows that are damaged or come from an attempt already replaced" in result.text()


def test_a_run_without_a_ledger_does_not_hold(tmp_path: Path) -> None:
    result = check(RunFolder(tmp_path / "absent"))
    assert not result.holds and "has no committed step" in result.text()


def test_a_step_without_an_update_is_in_its_place_and_trained_nothing(make: Make) -> None:
    golden, skipping = make((1, 20)), make((1, 20))
    rows = [json.loads(line) for line in skipping.ledger.read_text().splitlines()]
    rows[6] |= {"applied": False, "loss_hex": "nan", "gradient_norm_hex": "nan", "left_out": "loss 9 is far above"}
    skipping.ledger.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = check(skipping, expected=samples_of, num_steps=20)
    assert alone.holds and alone.num_skipped_steps == 1 and "1 step without an update" in alone.text()
    compared = compare(skipping, golden)
    assert (compared.lost, compared.repeated, compared.holds) == (4, 0, False)
    assert compare(skipping, skipping).holds and compare(skipping, skipping).bitwise
