"""What a person can mend, said so that they can."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_CRASH = 1
EXIT_USER = 2
EXIT_CHECK_FAILED = 3
EXIT_PREEMPTED = 75


class UserError(Exception):
    """One or more problems that only the person can mend (exit code 2).

    Every problem names the value, where it came from, what it collides with, and the fix as an imperative. All problems
    known at one moment are raised together, so that nobody mends them one run at a time.
    """

    def __init__(self, *problems: str) -> None:
        if not problems:
            raise ValueError("a UserError needs at least one problem")
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(problems))


class CheckFailed(Exception):
    """A check that was asked for (verify, inspect, export, doctor) did not hold (exit code 3)."""


class Preempted(Exception):
    """The run was asked to stop and has saved its state (exit code 75): the same command with `--resume` goes on."""


def raise_if_any(problems: Sequence[str]) -> None:
    """Raise one `UserError` with all `problems`, or return when there are none."""
    if problems:
        raise UserError(*problems)
