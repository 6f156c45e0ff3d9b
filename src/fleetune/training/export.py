"""`fleetune export`: the result of a run for other programs, checked against the trained model before it is published.

The check loads what was written with plain transformers (and plain PEFT for an adapter), in the way its user will, and
compares the logits of real rows with those of the model that was trained.
"""

from __future__ import annotations

import json
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
#: Mean divergence (nats a token) that rounding explains, by the precision of weights and computation. Of SmolLM2 after 60
#: steps of LoRA: 6e-4 by the rounding of merged weights to bf16, 2e-3 when bf16 computes, 3e-6 by rounding to fp16.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-3}


@dataclass(frozen=True)
class ExportReport:
    """Where the export is, and how far what it predicts is from what the trained model predicts.

    divergence: mean Kullback-Leibler divergence over the tokens of the rows, in nats; `tolerance` is its limit.
    max_difference: the largest difference of a log-probability, in nats, of all next tokens with a probability over 1e-4.
    precision: of the exported weights, and of both models in the comparison.
    """

    path: Path
    kind: str
    precision: str
    divergence: float
    tolerance: float
    max_difference: float
    checked_with: str
    rows: int


def export_run(run: str, *, to: str, out: Path | None = None, precision: str | None = None) -> ExportReport:
    """Export a run's result as `adapter` or `merged` and check it. Raises UserError, or CheckFailed (nothing published).

    precision: of the model's weights, `fp32`, `bf16` or `fp16`; None: of merged ones the run's, of fully trained ones the fp32
    that they are trained in. An adapter is fp32 always.
    """
    folder = RunFolder(Path(run))
    if not folder.prepared.exists():
        raise UserError(f"{run} is not a run folder: give the folder that fleetune train wrote (runs/...)")
    prepared = Prepared.read(folder)
    is_adapter = (folder.adapter / "adapter_config.json").exists()
    if not is_adapter and not (folder.model / "config.json").exists():
        raise UserError(f"{run} has no result yet: finish it with fleetune train --run {run} --resume")
    if to == "adapter" and not is_adapter:
        raise UserError(f"{run} trained all weights, it has no adapter: use --to merged")
    if to == "adapter" and precision is not None:
        raise UserError("--precision is of merged weights: an adapter is written as it was trained, in fp32")
    precision = precision or (prepared.precision if is_adapter else "fp32")
    model = trained_model(prepared, folder, is_adapter=is_adapter, precision=precision)
    rows = rows_to_check(prepared)
    wanted = [log_probabilities_of(model, row) for row in rows]
    target = out or folder.path / "export" / to
    if out is not None and out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: give --out a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with published(target) as temporary:
        write(to, model, folder, prepared, temporary, precision=precision)
        copy_companions(folder.adapter if is_adapter else folder.model, Path(prepared.model_folder), temporary)
        difference = difference_of(load_elsewhere(to, temporary, prepared, precision=precision), rows, wanted)
        if not difference.divergence <= TOLERANCE[precision]:
            raise CheckFailed(
                f"the exported {to} predicts otherwise than the trained model on rows of its own data, by "
                f"{difference.divergence:.3g} nats a token (rounding in {precision} explains up to {TOLERANCE[precision]:g}): "
                "nothing was published"
            )
    return ExportReport(
        path=target,
        kind=to,
        precision=precision,
        divergence=difference.divergence,
        tolerance=TOLERANCE[precision],
        max_difference=difference.largest,
        checked_with=checked_with(to, prepared),
        rows=len(rows),
    )


def checked_with(to: str, prepared: Prepared) -> str:
    if to == "merged":
        return "transformers"
    return "transformers and peft" + (", on the dequantised base" if prepared.quantized_folder else "")


def trained_model(prepared: Prepared, folder: RunFolder, *, is_adapter: bool, precision: str) -> CausalModel:
    """The model as it was trained, with our own layers."""
    import torch

    from fleetune.models.adapters import load_adapter
    from fleetune.models.build import load_model

    base = Path(prepared.model_folder) if is_adapter else folder.model
    model = load_model(
        base,
        dtype=precision,
        device=torch.device("cpu"),
        trainable=False,
        quantized=quantized_of(prepared) if is_adapter else None,
    )
    if is_adapter:
        model = load_adapter(model, folder.adapter, trainable=False)
    model.eval()
    return model


def write(to: str, model: CausalModel, folder: RunFolder, prepared: Prepared, target: Path, *, precision: str) -> None:
    """The weights and their config, one tensor at a time."""
    import shutil

    if to == "adapter":
        for file in folder.adapter.iterdir():
            shutil.copyfile(file, target / file.name)
        return
    from fleetune.models.build import PRECISIONS
    from fleetune.models.merge import merged_tensors
    from fleetune.models.stored import StoredWeights, write_weights
    from fleetune.spec.safetensors_header import SINGLE_FILE

    base = Path(prepared.model_folder) if model.adapter else folder.model
    shapes = {name: tuple(tensor.shape) for name, tensor in StoredWeights.open(base).tensors()}
    dtype = PRECISIONS[precision]
    if model.adapter is None:
        tensors = StoredWeights.open(base).tensors()
    else:
        tensors = merged_tensors(base, trained_weights(model), model.adapter, dtype=dtype, quantized=quantized_of(prepared))
    write_weights(target / SINGLE_FILE, shapes, tensors, dtype)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")  # transformers loads weights in what stands here
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


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


@dataclass(frozen=True)
class Difference:
    """divergence: mean over all tokens; largest: of a log-probability that matters. Nats."""

    divergence: float
    largest: float


def difference_of(module: Any, rows: list[np.ndarray], wanted: list[torch.Tensor]) -> Difference:
    """How far `module` is from the log-probabilities that are wanted; fp32 [L, V] of each row."""
    largest, divergence, num_tokens = 0.0, 0.0, 0
    for row, before in zip(rows, wanted):
        off = before - log_probabilities(module, row)
        largest = max(largest, float(off[before > -9.2].abs().max()))
        divergence += float((before.exp() * off).sum())
        num_tokens += len(row)
    return Difference(max(0.0, divergence / num_tokens), largest)  # rounding takes equal ones a little below 0


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


def load_elsewhere(to: str, folder: Path, prepared: Prepared, *, precision: str) -> Any:
    """The export as its user will load it, with nothing of ours but, under an adapter, the base it was trained on."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from fleetune.models.build import PRECISIONS

    logging.disable_progress_bar()  # it would write over our own words

    dtype = PRECISIONS[precision]
    if to == "merged":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(prepared.model_folder, dtype=dtype)
    put_in_quantized(base, prepared)
    return PeftModel.from_pretrained(base, folder).eval()
