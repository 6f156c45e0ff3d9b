"""How many processes: by failures, by request; and a real run that grows and shrinks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fleetune.launch.devices import choose_processes
from fleetune.launch.ending import Ending
from fleetune.launch.request import device_variables
from fleetune.launch.size import Size, ask_for, take_request
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder
from launch.runs import PATIENCE, TinyRun


def failed(rank: int | None) -> Ending:
    return Ending("crash", "broke", rank)


def test_a_device_on_which_two_attempts_in_a_row_began_to_fail_is_given_up() -> None:
    size = Size(4, at_least=2)
    assert size.after_failure(failed(1)) is None
    assert size.after_failure(failed(2)) is None, "another rank: nothing is wrong with either device yet"
    assert size.after_failure(failed(1)) is None
    change = size.after_failure(failed(1))
    assert change is not None and (change.before, change.after) == (4, 3) and "device 1" in change.cause
    assert size.devices == (0, 2, 3)
    assert size.after_failure(failed(1)) is None  # rank 1 is another device now
    change = size.after_failure(failed(1))
    assert change is not None and "device 2" in change.cause and size.devices == (0, 3)


def test_below_the_minimum_no_device_is_given_up() -> None:
    size = Size(2, at_least=2)
    for _ in range(5):
        assert size.after_failure(failed(0)) is None
    assert Size(1, at_least=1).after_failure(failed(0)) is None


def test_a_failure_of_no_rank_blames_no_device() -> None:
    size = Size(3, at_least=1)
    assert size.after_failure(failed(0)) is None
    assert size.after_failure(failed(None)) is None
    assert size.after_failure(failed(0)) is None


def test_devices_that_are_gone_are_given_up_at_once() -> None:
    size = Size(4, at_least=1, count_devices=lambda: 3)
    change = size.after_failure(failed(2))
    assert change is not None and size.devices == (0, 1, 2) and "3 devices left of 4" in change.cause


def test_a_request_brings_devices_back() -> None:
    size = Size(3, at_least=1)
    size.after_failure(failed(0))
    size.after_failure(failed(0))
    assert size.devices == (1, 2)
    assert size.to(2, "asked for") is None
    change = size.to(4, "asked for")
    assert change is not None and (change.before, change.after) == (2, 4) and size.devices == (0, 1, 2, 3)
    assert size.to(1, "asked for") is not None and size.num_processes == 1


def test_a_run_that_was_small_for_a_while_is_back_at_its_old_minimum() -> None:
    size = Size(4, at_least=4)
    assert size.to(1, "asked for") is not None and size.at_least == 1
    assert size.to(4, "asked for") is not None and size.at_least == 4
    for _ in range(4):
        assert size.after_failure(failed(2)) is None


def test_only_the_devices_in_use_are_visible_to_the_workers() -> None:
    assert device_variables((0, 2), {}) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert device_variables((0, 2), {"CUDA_VISIBLE_DEVICES": "4, GPU-a,6"}) == {"CUDA_VISIBLE_DEVICES": "4,6"}


def test_fewer_gpus_than_the_most_will_do_where_the_least_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetune.launch import devices

    monkeypatch.setattr(devices, "count_devices", lambda device: ("cuda", 3))
    assert choose_processes("cuda", 4, 2) == ("cuda", 3)
    assert choose_processes("cuda", 2, 1) == ("cuda", 2)
    with pytest.raises(UserError, match="this machine has 3"):
        choose_processes("cuda", 8, 4)


def test_a_request_is_taken_once_and_a_strange_one_is_thrown_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert take_request(folder) is None
    ask_for(folder, 3)
    assert take_request(folder) == 3 and take_request(folder) is None
    (tmp_path / "resize.json").write_text('{"version": 1, "gpus": "many"}')
    assert take_request(folder) is None and not (tmp_path / "resize.json").exists()


LONG: dict[str, Any] = {"sync": True, "steps": 400, "step_s": 0.05}


@pytest.mark.claim(
    "H2",
    command="fleetune resize RUN --gpus N",
    seen="a running job gets more processes, or fewer, and goes on from its checkpoint",
)
def test_a_run_grows_and_shrinks_when_it_is_asked_to(tmp_path: Path) -> None:
    ends = {"sync": True, "first": 20, "steps": 3}
    plans = {f"{attempt}/{rank}": {**LONG, "first": 1000 * attempt} for attempt in (0, 1) for rank in range(3)}
    run = TinyRun.make(tmp_path / "run", {**plans, "2/0": ends})
    asked: list[int] = []
    sizes = [3, 1]

    def ask() -> None:
        attempt = len(asked)
        if attempt < 2 and run.attempts() == attempt + 1 and run.has_stepped(attempt):
            ask_for(run.folder, sizes[attempt])
            asked.append(attempt)

    planned: list[int] = []
    assert run.supervise(2, ask, replan=planned.append) == 0
    assert [(row["before"], row["after"]) for row in run.events("resize")] == [(2, 3), (3, 1)] and planned == [3, 1]
    assert [row["num_processes"] for row in run.events("start")] == [2, 3, 1]
    assert not run.events("failure") and len(run.events("resized")) == 2
    assert len(list(run.folder.checkpoints.iterdir())) == 2, "all saved before they changed"
    assert not run.living() and not run.store_pids()


def test_a_size_that_cannot_be_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    run = TinyRun.make(
        tmp_path / "run", {"0/0": LONG, "0/1": LONG, "1/0": {"sync": True, "steps": 2}, "1/1": {"sync": True, "steps": 2}}
    )
    asked: list[int] = []

    def ask() -> None:
        if not asked and run.folder.ledger.exists():
            asked.append(1)
            ask_for(run.folder, 7)

    def replan(num_processes: int) -> None:
        raise UserError(f"{num_processes} ranks cannot share 2 micro-batches")

    assert run.supervise(2, ask, replan=replan) == 0
    assert "cannot share" in run.events("resize_refused")[0]["cause"] and not run.events("resize")
    assert any("keeps 2" in line for line in run.said)


@pytest.mark.claim(
    "H5",
    command="fleetune train --gpus 1:2",
    seen="a device that fails again and again is left behind, and the run goes on with fewer processes",
)
def test_a_run_goes_on_without_the_device_that_fails_again_and_again(tmp_path: Path) -> None:
    plans: dict[str, Any] = {}
    for attempt in (0, 1):
        plans |= {f"{attempt}/0": LONG, f"{attempt}/1": {"sync": True, "steps": 2, "then": "kill"}, f"{attempt}/2": LONG}
    after = {"sync": True, "first": 4, "steps": 2}
    run = TinyRun.make(tmp_path / "run", {**plans, "2/0": after, "2/1": after})
    assert run.supervise(3, min_processes=2, patience=dataclasses.replace(PATIENCE, peers_s=3.0)) == 0
    change = run.events("resize")[0]
    assert (change["before"], change["after"]) == (3, 2) and "device 1 (rank 1)" in change["cause"]
    assert [row["num_processes"] for row in run.events("start")] == [3, 3, 2]
