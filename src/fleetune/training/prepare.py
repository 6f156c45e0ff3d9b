"""Preparation, once a node and before any process group: `python -m fleetune.training.prepare RUN_FOLDER`.

Finds the weights, probes the precision, tokenises and packs the data, and writes `prepared.json`. Slow work and every
error of the data happen here, where no other rank waits in a collective.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from fleetune.models.precision import check_precision
from fleetune.spec.errors import EXIT_CRASH, EXIT_DONE, EXIT_USER, UserError
from fleetune.spec.run_folder import RunFolder, read_json, write_json
from fleetune.spec.run_spec import RunSpec
from fleetune.training.prepared import Prepared
from fleetune.training.sources import ModelRequest, ModelSource, prepare_source, probe, rows_fingerprint, tokenizer_of

if TYPE_CHECKING:
    from fleetune.data.request import DataRequest, PreparedData


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fleetune.training.prepare")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--precision", help="what the first machine of the run has found for all of them")
    arguments = parser.parse_args(argv)
    try:
        from fleetune.monitor.logs import configure_logging
        from fleetune.spec.read import read_run

        folder = RunFolder(arguments.folder)
        spec = read_run(folder).spec
        # Our lines go straight to a person's terminal: no token may be in them, in a library's traceback neither.
        configure_logging(level=spec.output.log_level)
        prepare(spec, folder, device=arguments.device, node=arguments.node, told=arguments.precision)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER
    except Exception:
        traceback.print_exc()
        return EXIT_CRASH
    return EXIT_DONE


def model_request(spec: RunSpec, probed: str | None = None) -> ModelRequest:
    weights = spec.weights
    return ModelRequest(
        model=weights.model,
        revision=weights.revision,
        offline=weights.offline,
        allow_remote_code=weights.allow_remote_code,
        precision=weights.precision,
        chat_template=weights.chat_template,
        trainable=spec.adaptation.method == "full",
        quantize=spec.adaptation.quantize,
        probed=probed,
    )


def decide_precision(spec: RunSpec, folder: RunFolder, *, device: str) -> str:
    """What `auto` is in this run, on its first machine: found once and written down, so that a run that goes on keeps it.

    The other machines are told: near the margin two of the same kind would choose differently, by noise alone.
    """
    if spec.weights.precision != "auto":
        decided: str = spec.weights.precision
    else:
        earlier = read_json(folder.precision) if folder.precision.exists() else {}
        decided = earlier["precision"] if earlier.get("device") == device else probe(device)
        check_precision(decided, device)
    write_json(folder.precision, {"precision": decided, "device": device})
    return decided


def prepare(spec: RunSpec, folder: RunFolder, *, device: str, node: int = 0, told: str | None = None) -> Prepared:
    """Prepare model and data of a run and write what was found. Raises UserError for what a person can mend.

    node: which machine this is; only node 0 writes down the rows that cannot be used, which are the same on all. told: what
    node 0 has decided to compute in; None on node 0, which decides.
    """
    if told is None:
        told = decide_precision(spec, folder, device=device)
    elif spec.weights.precision == "auto":
        check_precision(told, device)
    request = model_request(spec, told)
    source = prepare_source(request, device=device)
    data = prepare_rows(spec, source, request, folder.quarantine if node == 0 else None)
    prepared = Prepared(
        model_folder=str(source.folder),
        model_name=source.name,
        hub_id=source.hub_id,
        model_fingerprint=source.fingerprint,
        adapter_folder=str(source.adapter) if source.adapter else None,
        store=str(data.store),
        validation_store=str(data.validation_store) if data.validation_store else None,
        data_fingerprint=data.fingerprint,
        precision=source.precision,
        device=device,
        num_sequences=data.num_sequences,
        has_conversations=any(file.shape != "text" for file in data.report.files),
        system=data.report.system,
        quantized_folder=str(source.quantized) if source.quantized else None,
    )
    prepared.write(folder, node)
    return prepared


def prepare_rows(spec: RunSpec, source: ModelSource, request: ModelRequest, quarantine: Path | None) -> PreparedData:
    """Tokenise and pack the rows, or find that it was done before. Raises UserError."""
    from fleetune.data.prepare import prepare_data

    asked = data_request(spec, source, request, quarantine)
    return prepare_data(asked, lambda: tokenizer_of(source, request))


def data_request(spec: RunSpec, source: ModelSource, request: ModelRequest, quarantine: Path | None) -> DataRequest:
    from fleetune.data.request import DataRequest

    return DataRequest.of_rows(
        spec.rows,
        tokenizer_fingerprint=rows_fingerprint(source, request),
        seed=spec.optimization.seed,
        offline=spec.weights.offline,
        quarantine=quarantine,
    )


if __name__ == "__main__":
    sys.exit(main())
