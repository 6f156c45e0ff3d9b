"""From a model's name and the spec's words to prepared weights, tokenizer and token stores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.spec.errors import UserError

if TYPE_CHECKING:
    from fleetune.models.locate import Located


@dataclass(frozen=True)
class ModelRequest:
    """Which model, and how its weights may be read. quantize: None: as the adapter was trained, if there is one.

    probed: what `auto` is where the model says nothing itself; None: found out on this device.
    """

    model: str
    revision: str | None = None
    offline: bool = False
    allow_remote_code: bool = False
    precision: str = "auto"
    chat_template: str | None = None
    trainable: bool = False
    quantize: str | None = None
    probed: str | None = None


@dataclass(frozen=True)
class ModelSource:
    """Prepared weights in an ordinary folder, on this node. precision: `fp32`, `bf16` or `fp16`, resolved.

    hub_id: where everybody finds the base model, if it came from the hub; None: only in `folder`. quantized: the folder of
    its quantised weights, or None.
    """

    folder: Path
    adapter: Path | None
    name: str
    hub_id: str | None
    fingerprint: str
    precision: str
    quantized: Path | None = None


def prepare_source(request: ModelRequest, *, device: str) -> ModelSource:
    """Find the model and make its weights ready for every process of this node. Once a node."""
    from fleetune.models.locate import locate
    from fleetune.models.weights import prepare_model

    located = locate(
        request.model,
        revision=request.revision,
        offline=request.offline,
        allow_remote_code=request.allow_remote_code,
    )
    quantize, precision = how_it_rests(request, located, device=device)
    # What is trained in full is held in fp32, whatever it computes in: only frozen weights rest in the compute type.
    dtype = "fp32" if request.trainable else precision
    prepared = prepare_model(located, dtype=dtype, allow_remote_code=request.allow_remote_code)
    if prepared.adapter is not None and request.trainable:
        raise UserError(
            f"model {request.model!r} is an adapter, and --method full trains all weights: give --method lora to go on with "
            "the adapter, or merge it first with fleetune export --to merged"
        )
    hub_id = None
    if located.revision is not None and prepared.adapter is None:
        hub_id = located.preset.hub if located.preset else request.model
    quantized = None
    if quantize != "none":
        from fleetune.models.quantized_files import prepare_quantized

        quantized = prepare_quantized(
            prepared.folder,
            scheme=quantize,
            fingerprint=located.base_fingerprint,
            dtype=dtype,
            allow_remote_code=request.allow_remote_code,
        )
    return ModelSource(prepared.folder, prepared.adapter, located.name, hub_id, prepared.fingerprint, precision, quantized)


def how_it_rests(request: ModelRequest, located: Located, *, device: str) -> tuple[str, str]:
    """(quantisation, precision) of the frozen weights: what is asked for, else what the adapter was trained on, else auto."""
    from fleetune.models.quantized_files import QuantisedUnder

    adapter = located.adapter if request.quantize is None else None
    trained_on = QuantisedUnder.read(adapter) if adapter is not None else None
    quantize = request.quantize or (trained_on.quantize if trained_on else "none")
    if request.precision != "auto":
        return quantize, request.precision
    known = located.precision or (trained_on.precision if trained_on else request.probed)
    return quantize, known or probe(device)


def probe(device: str) -> str:
    from fleetune.models.precision import probe_precision

    return probe_precision(device)


def tokenizer_of(source: ModelSource, request: ModelRequest) -> Any:
    from fleetune.models.tokenizer import load_tokenizer

    template = template_file(request.chat_template, source.adapter)
    return load_tokenizer(source.folder, chat_template=template, allow_remote_code=request.allow_remote_code)


def template_file(asked_for: str | None, adapter: Path | str | None) -> Path | None:
    """The chat template that replaces the model's own: the one asked for, else the one that the adapter was trained with."""
    if asked_for is not None:
        return Path(asked_for)
    own = Path(adapter) / "chat_template.jinja" if adapter is not None else None
    return own if own is not None and own.is_file() else None


def rows_fingerprint(source: ModelSource, request: ModelRequest) -> str:
    """What the tokenised rows depend on beside the rows: tokenizer and chat template, known without loading them."""
    from fleetune.data.keys import tokenizer_fingerprint

    file = template_file(request.chat_template, source.adapter)
    return tokenizer_fingerprint(source.folder, file.read_text(encoding="utf-8") if file else None)
