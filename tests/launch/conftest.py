from __future__ import annotations

from collections.abc import Iterator

import pytest

from launch.runs import STARTED


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """A supervisor that a failed test has left is killed; its processes die with it."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
            process.wait()
    STARTED.clear()
