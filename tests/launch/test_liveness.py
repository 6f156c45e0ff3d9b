"""The judge of hangs, with a clock that the tests turn."""

from __future__ import annotations

import random

import pytest

from fleetune.launch.liveness import AGENT, Liveness


class Team:
    """Ranks that give signs of life twice a second and make steps of given lengths, seen as a supervisor sees them."""

    def __init__(self, num_ranks: int = 2, hang_s: float = 10.0, start: float = 0.0) -> None:
        self.judge = Liveness(hang_s)
        self.now = start
        self.num_ranks = num_ranks
        self.marks = self.done = self.step = 0
        self.phase = "start"
        self.silent: set[int] = set()
        self.stuck_marks: dict[int, int] = {}

    def at(self, phase: str, step: int | None = None) -> None:
        self.phase, self.marks = phase, self.marks + 1
        self.step = self.step if step is None else step

    def run(self, seconds: float) -> float | None:
        """Let time pass; the time after which a hang was found, or None."""
        began = self.now
        while self.now < began + seconds - 1e-9:
            self.now += 0.1
            self.judge.pass_time(self.now)
            if round(self.now * 10) % 5 == 0:
                for rank in set(range(self.num_ranks)) - self.silent:
                    self.judge.saw(rank, self.phase, self.step, marks=self.marks, done=self.done)
            if self.judge.hung():
                return self.now - began
        return None

    def make(self, lengths: list[float]) -> float | None:
        """Make steps of these lengths; as `run`."""
        for seconds in lengths:
            self.at("step", self.step + 1)
            if self.run(seconds) is not None:
                return seconds
            self.done += 1
            self.at("data")
        return None


@pytest.mark.parametrize("usual", [0.3, 1.0, 4.0])
def test_no_false_alarm_in_300_steps_with_some_three_times_slower(usual: float) -> None:
    team, choose = Team(), random.Random(7)
    assert team.make([usual * choose.uniform(0.8, 1.2) * (3 if choose.random() < 0.1 else 1) for _ in range(300)]) is None
    assert usual < (team.judge.usual_s or 0.0) < 4 * usual


def test_a_stopped_rank_is_named_after_ten_seconds_of_silence() -> None:
    team = Team(num_ranks=3)
    assert team.make([0.5] * 20) is None
    team.at("step", 21)
    assert team.run(1.0) is None
    team.silent = {1}
    found_after = team.run(30)
    assert found_after is not None and 9 < found_after < 11
    hang = team.judge.hung()[0]
    assert (hang.rank, hang.phase, hang.step, hang.silent) == (1, "step", 21, True)
    assert "no sign of life for" in hang.cause() and "step 21" in hang.cause()


def test_a_step_that_never_ends_is_found_after_ten_seconds_or_six_times_the_slow_ones() -> None:
    fast, slow = Team(), Team()
    assert fast.make([0.5] * 50) is None and slow.make([4.0] * 50) is None
    for team, low, high in ((fast, 9.5, 11.0), (slow, 23.0, 26.0)):
        team.at("step", 51)
        found_after = team.run(60)
        assert found_after is not None and low < found_after < high
        assert not team.judge.hung()[0].silent and "no progress" in team.judge.hung()[0].cause()


def test_imports_a_compiling_first_step_an_evaluation_and_a_save_take_their_time() -> None:
    team = Team()
    assert team.run(200) is None
    team.at("load")
    assert team.run(200) is None
    assert team.make([150.0, 1.0, 1.0]) is None
    for phase, seconds in (("evaluate", 250.0), ("save", 300.0), ("data", 100.0), ("finish", 900.0)):
        team.at(phase)
        assert team.run(seconds) is None, phase


def test_each_phase_has_an_end() -> None:
    for phase, bound in (("start", 600), ("evaluate", 300), ("save", 600), ("data", 120)):
        team = Team()
        assert phase == "start" or team.make([1.0] * 3) is None
        team.at(phase)
        found_after = team.run(2000)
        assert found_after is not None and bound - 2 < found_after < bound + 2


def test_an_evaluation_that_gets_on_may_take_as_long_as_it_wants() -> None:
    team = Team()
    team.make([1.0] * 3)
    team.at("evaluate")
    for _ in range(20):
        assert team.run(200) is None
        team.marks += 1


def test_a_supervisor_that_was_stopped_itself_blames_nobody() -> None:
    team = Team()
    team.make([1.0] * 5)
    team.at("step", 6)
    team.now += 3600
    assert team.run(3) is None


def test_clocks_that_jump_are_not_looked_at() -> None:
    """The judge is given a monotonic clock alone: from any start, the same verdicts."""
    for start in (0.0, 1e9):
        team = Team(start=start)
        team.make([1.0] * 5)
        team.silent = {0}
        found_after = team.run(30)
        assert found_after is not None and 9 < found_after < 11 and team.judge.hung()[0].rank == 0


def test_a_rank_that_has_ended_is_not_missed() -> None:
    team = Team()
    team.make([1.0] * 5)
    team.silent = {1}
    team.judge.saw_end([1])
    team.at("evaluate")
    assert team.run(200) is None


@pytest.mark.parametrize("is_heard", [True, False])
def test_the_agent_is_watched_from_its_first_sign_on_and_where_it_never_gives_one(is_heard: bool) -> None:
    team = Team()
    team.make([1.0] * 5)
    team.judge.expect(AGENT, "watch")
    if is_heard:
        team.judge.saw(AGENT, "watch", 0)
    found = None
    for _ in range(30):
        found = found or team.make([1.0])
    assert found and team.judge.hung()[0].rank == AGENT and "agent" in team.judge.hung()[0].cause()


def test_a_rank_that_was_started_and_never_gives_a_sign_is_found() -> None:
    team = Team()
    team.silent = {1}
    team.judge.expect(0)
    team.judge.expect(1)
    found_after = team.run(2000)
    hang = team.judge.hung()[0]
    assert found_after is not None and 598 < found_after < 602
    assert (hang.rank, hang.silent) == (1, True) and "in phase begin" in hang.cause()


def test_a_longer_timeout_and_none_at_all_are_respected() -> None:
    for hang_s, found in ((30.0, True), (0.0, False)):
        team = Team(hang_s=hang_s)
        team.make([0.5] * 20)
        team.silent = {0}
        found_after = team.run(100)
        assert (found_after is not None and 29 < found_after < 31.5) is found
