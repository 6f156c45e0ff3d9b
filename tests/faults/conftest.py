from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.harness import Faulted, Place


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Place:
    """Where the undisturbed runs lie; each is made when a row first asks for it."""
    return Place.make(tmp_path_factory.mktemp("faults"), tiny_llama)


@pytest.fixture
def place(goldens: Place, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place for the runs of one test, beside the golden ones. Whatever a failed test has left is ended."""
    mine = goldens.for_test(request.node.name)
    yield mine
    mine.end_all()


@pytest.fixture
def golden(goldens: Place) -> Callable[..., Path]:
    return goldens.golden


@pytest.fixture(scope="session")
def stopped(goldens: Place) -> Faulted:
    """A run that was stopped after two checkpoints or more; every test works on a copy."""
    run = goldens.for_test("row-21").start("stopped", "--gpus", "2")
    run.wait_step(14)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 75
    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests wait for real bounds of time, on machines that others may use too."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1500))
