from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from fleetune.cli.main import main


@pytest.fixture
def command(capsys) -> Iterator[Callable[..., SimpleNamespace]]:
    """Run a command line in this process (importing torch again costs ten seconds); what it does to logging is undone.

    command("presets", "--json") -> returncode, stdout, stderr.
    """
    root, level = logging.getLogger(), logging.getLogger("fleetune").level
    handlers = root.handlers[:]

    def run(*words: str | os.PathLike[str]) -> SimpleNamespace:
        streams = sys.stdout, sys.stderr
        try:
            code = main([*map(os.fspath, words)])
        finally:
            sys.stdout, sys.stderr = streams
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    yield run
    root.handlers[:] = handlers
    logging.getLogger("fleetune").setLevel(level)
    logging.captureWarnings(False)
