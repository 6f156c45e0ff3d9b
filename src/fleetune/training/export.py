"""`fleetune export`: the result of a run for other programs, checked against the trained model before it is published.

The check loads what was written with plain transformers (and plain PEFT for an adapter), in the way its user will, and
compares the logits of real rows with those of the model that was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.spec.errors import CheckFailed, UserError
from fleetune.spec.run_folder import RunFolder
from fleetune.training.prepared import Prepared
from fleetune.training.result import published

if TYPE_CHECKING:
    import numpy as np
    import torch

    from fleetune.models.causal import CausalModel

#: Rows and tokens of each that the check reads: enough to see any wrong weight, few enough for seconds.
CHECK_ROWS = 3
CHECK_TOKENS = 96
#: Files beside the weights that belong to a model.
COMPANIONS = (".json", ".jinja", ".txt", ".model")
NOT_COMPANIONS = ("adapter_config", "base_quantization", "config.json", "README")
#: Largest difference of log-probabilities (nats) that rounding explains, by the precision of the weights.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.05}


@dataclass(frozen=True)
class ExportReport:
    """Where the export is, and how far its log-probabilities are from the trained model's (largest, in nats)."""

    path: Path
    kind: str
    max_difference: float
    tolerance: float
    checked_with: str
    rows: int


def export_run(run: str, *, to: str, out: Path | None = None) -> ExportReport:
    """Export a run's result as `adapter` or `merged` and check it. Raises UserError, or CheckFailed (nothing published)."""
    folder = RunFolder(Path(run))
    if not folder.prepared.exists():
        raise UserError(f"{run} is not a run folder: give the folder that fleetune train wrote (runs/...)")
    prepared = Prepared.read(folder)
    is_adapter = (folder.adapter / "adapter_config.json").exists()
    if not is_adapter and not (folder.model / "config.json").exists():
        raise UserError(f"{run} has no result yet: finish it with fleetune train --run {run} --resume")
    if to == "adapter" and not is_adapter:
        raise UserError(f"{run} trained all weights, it has no adapter: use --to merged")
    model = trained_model(prepared, folder, is_adapter=is_adapter)
    rows = rows_to_check(prepared)
    wanted = [log_probabilities_of(model, row) for row in rows]
    target = out or folder.path / "export" / to
    if out is not None and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: give --out a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with published(target) as temporary:
        write(to, model, folder, prepared, temporary)
        copy_companions(folder.adapter if is_adapter else folder.model, Path(prepared.model_folder), temporary)
        difference = largest_difference(load_elsewhere(to, temporary, prepared), rows, wanted)
        tolerance = TOLERANCE[prepared.precision]
        if not difference <= tolerance:
            raise CheckFailed(
                f"the exported {to} differs from the trained model by {difference:.3g} nats on rows of its own data (rounding "
                f"explains up to {tolerance:g}): nothing was published"
            )
    return ExportReport(target, to, difference, tolerance, checked_with(to, prepared), len(rows))


def checked_with(to: str, prepared: Prepared) -> str:
    if to == "merged":
        return "transformers"
    return "transformers and peft" + (", on the dequantised base" if prepared.quantized_folder else "")


def trained_model(prepared: Prepared, folder: RunFolder, *, is_adapter: bool) -> CausalModel:
    """The model as it was trained, with our own layers."""
    import torch

    from fleetune.models.adapters import load_adapter
    from fleetune.models.build import load_model

    base = Path(prepared.model_folder) if is_adapter else folder.model
    model = load_model(
        base,
        dtype=prepared.precision,
        device=torch.device("cpu"),
        trainable=False,
        quantized=quantized_of(prepared) if is_adapter else None,
    )
    if is_adapter:
        model = load_adapter(model, folder.adapter, trainable=False)
    model.eval()
    return model


def write(to: str, model: CausalModel, folder: RunFolder, prepared: Prepared, target: Path) -> None:
    """The weights and their config, one tensor at a time."""
    import shutil

    if to == "adapter" or model.adapter is None:
        result = folder.adapter if to == "adapter" else folder.model
        for file in result.iterdir():
            shutil.copyfile(file, target / file.name)
        return
    from fleetune.models.build import PRECISIONS
    from fleetune.models.merge import merged_tensors
    from fleetune.models.stored import SINGLE_FILE, StoredWeights, write_weights

    base = Path(prepared.model_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in StoredWeights.open(base).tensors()}
    tensors = merged_tensors(base, trained_weights(model), model.adapter, quantized=quantized_of(prepared))
    write_weights(target / SINGLE_FILE, shapes, tensors, PRECISIONS[prepared.precision])
    shutil.copyfile(base / "config.json", target / "config.json")


def quantized_of(prepared: Prepared) -> Path | None:
    return Path(prepared.quantized_folder) if prepared.quantized_folder else None


def trained_weights(model: CausalModel) -> dict[str, torch.Tensor]:
    """The adapter's weights by their names in the model."""
    parameters = dict(model.module.named_parameters())
    assert model.adapter is not None
    return {name: parameters[name].detach() for name in model.adapter.weight_names()}


def copy_companions(result: Path, base: Path, target: Path) -> None:
    """Tokenizer, chat template and generation settings: without them the export talks gibberish elsewhere."""
    import shutil

    for folder in (result, base):
        for file in sorted(folder.iterdir()):
            weights = file.suffix == ".safetensors" or file.name.startswith(NOT_COMPANIONS)
            if file.is_file() and not weights and not (target / file.name).exists() and file.suffix in COMPANIONS:
                shutil.copyfile(file, target / file.name)


def rows_to_check(prepared: Prepared) -> list[np.ndarray]:
    """The first tokens of a few of the run's own rows; int64 [L] each."""
    from fleetune.data.loader import evaluation_batches
    from fleetune.data.store import TokenStore

    store = TokenStore.open(Path(prepared.validation_store or prepared.store))
    rows: list[Any] = []
    for batch in evaluation_batches(store, micro_batch_tokens=1, data_rank=0, data_ranks=1, max_rows=CHECK_ROWS):
        rows.append(batch.tokens[:CHECK_TOKENS].copy())
        if len(rows) == CHECK_ROWS:
            break
    return rows


def log_probabilities_of(model: CausalModel, tokens: np.ndarray) -> torch.Tensor:
    """fp32 [L, V] of the trained model, by its plain forward."""
    with model.own_attention() as module:
        return log_probabilities(module, tokens)


def log_probabilities(module: Any, tokens: np.ndarray) -> torch.Tensor:
    import torch

    with torch.no_grad():
        logits = module(input_ids=torch.as_tensor(tokens)[None], use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def largest_difference(module: Any, rows: list[np.ndarray], wanted: list[torch.Tensor]) -> float:
    """The largest difference (nats) of a log-probability, over all tokens with a probability that matters (over 1e-4)."""
    largest = 0.0
    for row, before in zip(rows, wanted):
        after = log_probabilities(module, row)
        matters = before > -9.2
        largest = max(largest, float((before - after)[matters].abs().max()))
    return largest


def put_in_quantized(base: Any, prepared: Prepared) -> None:
    """Give a plain transformers model the weights that the adapter was trained on, where those were quantised."""
    folder = quantized_of(prepared)
    if folder is None:
        return
    import torch

    from fleetune.models.anatomy import is_conv1d
    from fleetune.models.quantized_files import QuantizedWeights

    weights = QuantizedWeights.open(folder)
    with torch.no_grad():
        for name in weights.layers:
            layer = base.get_submodule(name)
            dense = weights.dense(name, layer.weight.dtype)
            layer.weight.copy_(dense.t() if is_conv1d(layer) else dense)


def load_elsewhere(to: str, folder: Path, prepared: Prepared) -> Any:
    """The export as its user will load it, with nothing of ours but, under an adapter, the base it was trained on."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from fleetune.models.build import PRECISIONS

    logging.disable_progress_bar()  # it would write over our own words

    dtype = PRECISIONS[prepared.precision]
    if to == "merged":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(prepared.model_folder, dtype=dtype)
    put_in_quantized(base, prepared)
    return PeftModel.from_pretrained(base, folder).eval()
