from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

#: Real data beside the checkout; tests that need it are skipped, with a reason, where it is absent.
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("the real data sets (../shared/data) are not beside this checkout")
    return SHARED_DATA


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random llama of 2 layers and its tokenizer, shared by the session: never write into it."""
    import tiny

    return tiny.write_model(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests never read or fill a person's cache, and never reach a network."""
    import os

    if "FLEETUNE_TEST_CACHE" in os.environ:
        os.environ["FLEETUNE_CACHE"] = os.environ["FLEETUNE_TEST_CACHE"]
    else:
        os.environ["FLEETUNE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"
