from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Cases beside the plain families: what else changes how a model is run.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral with a window": ("mistral", {"sliding_window": 6}),
    "gpt_oss with windows": ("gpt_oss", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma2": ("gemma2", {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6}),
    "opt with projections": ("opt", {"word_embed_proj_dim": 24}),
    "opt with the norm behind": ("opt", {"do_layer_norm_before": False}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "falcon with alibi": ("falcon", {"alibi": True}),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "mamba": ("mamba", {"state_size": 4}),
    "bert as a decoder": ("bert", {"is_decoder": True, "intermediate_size": 96}),
    "granite": ("granite", {"intermediate_size": 96, "num_key_value_heads": 2, "logits_scaling": 6.0}),
    "cohere": ("cohere", {"intermediate_size": 96, "num_key_value_heads": 2, "logit_scale": 0.25}),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny products: several threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model by family or case, written once a session: never write into it."""
    import tiny

    root = tmp_path_factory.mktemp("families")

    def folder_of(name: str) -> Path:
        folder = root / name.replace(" ", "-").replace(",", "")
        if not (folder / "config.json").exists():
            family, overrides = CASES.get(name, (name, {}))
            tiny.write_model(folder, family, **overrides)
        return folder

    return folder_of


def all_models() -> list[str]:
    import tiny

    return [*tiny.FAMILIES, *CASES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `any_model` runs for every family and case."""
    if "any_model" in metafunc.fixturenames:
        metafunc.parametrize("any_model", all_models())
