"""`--fast off` reaches the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from fleetune.models.objective import TokenLoss
from fleetune.models.wanted import load_whole
from fleetune.spec.run_spec import from_flat
from fleetune.training.build import wanted_model
from fleetune.training.prepared import Prepared
from micro_batches import random_batch


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tiny.write_model(tmp_path_factory.mktemp("model"))
    return Prepared(
        model_folder=str(folder),
        model_name="tiny",
        hub_id=None,
        model_fingerprint="",
        adapter_folder=None,
        store="",
        validation_store=None,
        data_fingerprint="",
        precision="bf16",
        device="cpu",
        num_sequences=1,
        has_conversations=False,
    )


def kinds_of_operations(fast: str, prepared: Prepared, *, method: str) -> tuple[str, set[str], float]:
    """The layout, the names of the operations that a backward goes through, and the loss."""
    spec = from_flat({"model": "tiny", "data": ("rows",), "method": method, "fast": fast})
    model = load_whole(wanted_model(spec, prepared), torch.device("cpu"))
    laid_out = model.lay_out(random_batch([7, 12, 5, 33]))
    loss, _ = TokenLoss()(model.hidden(laid_out), laid_out, model.head)
    names, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in names:
            names.add(node)
            left += [before for before, _ in node.next_functions]
    return model.layout, {node.name() for node in names}, loss.item()


@pytest.mark.parametrize("method", ["lora", "full"])
def test_fast_off_is_the_plain_path(method: str, prepared: Prepared, tmp_path: Path):
    ours = {"_RmsNormBackward", "_RotateBackward", "_GroupedAttentionBackward", "_HeadLossBackward"}
    ours |= {"_ProductsBackward", "_GatedProductBackward"} if method == "lora" else {"_GatedBackward"}
    layout, names, loss = kinds_of_operations("on", prepared, method=method)
    assert layout == "flat" and ours <= names
    plain_layout, plain_names, plain_loss = kinds_of_operations("off", prepared, method=method)
    assert plain_layout == "documents" and not any(name.startswith("_") for name in plain_names)
    assert loss == pytest.approx(plain_loss, rel=5e-3)
