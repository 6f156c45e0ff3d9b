from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Runs functions of `parallel.cases` on real ranks."""
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()
