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

from fleetune.cli.flags import Flags, one_word, option, switch
from fleetune.spec.errors import EXIT_DONE, UserError

ABOUT = """Measure training on this machine, fleetune and TRL in turns: the same model, tokens, trained tokens, adapter, global
batch of two sequences and optimizer. Nothing else should run meanwhile. TRL comes with fleetune[bench]."""


def flags() -> Flags:
    return Flags(
        "bench",
        ABOUT,
        usage="throughput --model MODEL --data DATA [FLAGS]",
        fields=("model", "data", "method", "lora_rank", "sequence_length", "gpus", "threads", "precision"),
        own=[
            option("--against", "The program beside it.", type=click.Choice(["trl", "nothing"]), metavar="trl|nothing"),
            option(
                "--steps", "Steps of each run, less two that are not counted. Else 8.", type=click.IntRange(min=4), metavar="N"
            ),
            option("--rounds", "How often each program runs. Else 3.", type=click.IntRange(min=1), metavar="N"),
            option("--keep", "Folder for everything that is written; else a temporary one.", metavar="DIR"),
            switch("--json", "Print every figure of every run as JSON."),
        ],
    )


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    what = one_word(typed, "measurement", "fleetune bench throughput --model smollm2-135m --data rows.jsonl")
    if what != "throughput":
        raise UserError(f"there is no measurement {what!r}: give throughput")
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
        "repeats": typed.own["rounds"] or 3,
        "processes": processes,
        "threads": spec.layout.threads or max(1, cores() // processes),
        "precision": spec.weights.precision,
        "against": None if typed.own["against"] == "nothing" else "trl",
    }
    with tempfile.TemporaryDirectory(prefix="fleetune-bench-") as temporary:
        kept = typed.own["keep"]
        folder = Path(kept).expanduser().absolute() if kept else Path(temporary)
        request = json.dumps({"asked": asked, "folder": str(folder), "as_json": typed.own["json"]})
        # The measuring room stands beside this one, so it is another program: no door leads there.
        return subprocess.run([sys.executable, "-m", "fleetune.bench.command", request], check=False).returncode


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
