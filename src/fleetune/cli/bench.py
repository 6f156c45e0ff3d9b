"""`fleetune bench`: how fast training is here, beside another program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from fleetune.cli.flags import Flags, Typed, one_word, option, switch
from fleetune.spec.errors import EXIT_DONE, UserError, raise_if_any

ABOUT = """Measure training on this machine; nothing else should run meanwhile.

throughput: fleetune and TRL in turns, with the same model, tokens, trained tokens, adapter, global batch of two sequences and
optimizer. TRL comes with fleetune[bench].
scaling: 1, 2, ... processes up to --gpus, with the same global batch: tokens/s, memory per device, speed-up, efficiency,
difference of the losses, bytes sent; also over a slow link (--link-mbit 1000; needs root).
memory: full fine-tuning, LoRA and QLoRA, each with and without gradient checkpointing; of a model of random weights with
--random-parameters 1000000000."""

#: What can be measured; the rounds of each where none are asked for.
_ROUNDS = {"throughput": 3, "scaling": 3, "memory": 1}


def flags() -> Flags:
    return Flags(
        "bench",
        ABOUT,
        usage="throughput|scaling|memory --model MODEL --data DATA [FLAGS]",
        fields=("model", "data", "method", "lora_rank", "sequence_length", "gpus", "threads", "precision"),
        own=[
            option("--against", "The program beside it.", type=click.Choice(["trl", "nothing"]), metavar="trl|nothing"),
            option(
                "--steps", "Steps of each run, less two that are not counted. Else 8.", type=click.IntRange(min=4), metavar="N"
            ),
            option("--rounds", "How often each runs. Else 3; 1 for memory.", type=click.IntRange(min=1), metavar="N"),
            option("--link-mbit", "Also over a link of so many Mbit/s.", type=click.IntRange(min=1), metavar="N"),
            option(
                "--random-parameters",
                "A model of about so many random weights, with the tokenizer of --model.",
                type=click.IntRange(min=1_000_000),
                metavar="N",
            ),
            option("--keep", "Folder for everything that is written; else a temporary one.", metavar="DIR"),
            switch("--json", "Print every figure of every run as JSON."),
        ],
    )


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    what = one_word(typed, "measurement", "fleetune bench throughput --model smollm2-135m --data rows.jsonl")
    if what not in _ROUNDS:
        raise UserError(f"there is no measurement {what!r}: give {', '.join(_ROUNDS)}")
    _refuse_what_is_not_measured(what, typed)
    from fleetune.spec.read import resolve

    spec = resolve(flags=typed.source()).spec
    processes = spec.layout.gpus or 1
    asked = {
        "model": spec.weights.model,
        "data": [str(Path(name).absolute()) if Path(name).exists() else name for name in spec.rows.data],
        "method": spec.adaptation.method,
        "rank": spec.adaptation.lora_rank,
        "sequence_length": spec.rows.sequence_length,
        "steps": typed.own["steps"] or 8,
        "repeats": typed.own["rounds"] or _ROUNDS[what],
        "processes": processes,
        "threads": spec.layout.threads or max(1, cores() // processes),
        "precision": spec.weights.precision,
        "against": None if typed.own["against"] == "nothing" else "trl",
        "link_mbit": typed.own["link_mbit"],
        "random_parameters": typed.own["random_parameters"],
    }
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as temporary:
        kept = typed.own["keep"]
        folder = Path(kept).expanduser().absolute() if kept else Path(temporary)
        request = json.dumps({"measurement": what, "asked": asked, "folder": str(folder), "as_json": typed.own["json"]})
        # The measuring room stands beside this one, so it is another program: no door leads there.
        return subprocess.run([sys.executable, "-m", "fleetune.bench.command", request], check=False).returncode


def _refuse_what_is_not_measured(what: str, typed: Typed) -> None:
    only = {"against": "throughput", "link_mbit": "scaling", "random_parameters": "memory"}
    raise_if_any(
        [
            f"--{name.replace('_', '-')} belongs to `fleetune bench {owner}`, and {what} is asked for: leave it out"
            for name, owner in only.items()
            if typed.own[name] is not None and what != owner
        ]
    )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
