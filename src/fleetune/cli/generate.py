"""`fleetune generate`: one reply of a model, on standard output as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetune.cli.flags import Flags, Typed, option
from fleetune.cli.reading import MODEL_FIELDS, device_of, read_spec, start_logging
from fleetune.spec.errors import EXIT_DONE, UserError
from fleetune.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from fleetune.training.generation import Generator, Sampling

ABOUT = """Let a model reply once. MODEL is anything that --model of train takes: a run folder is its result.

PROMPT is the user's turn, put into the model's chat template; - reads it from standard input."""

#: How a reply is drawn; shared with chat.
SAMPLING = (
    option("--system", "A system prompt.", metavar="TEXT"),
    option("--temperature", "0 always takes the likeliest token.", type=click.FloatRange(min=0.0), metavar="X"),
    option("--top-p", "Draw from the likeliest tokens that hold this share.", type=click.FloatRange(0, 1, min_open=True),
           metavar="X"),
    option("--top-k", "Draw from so many likeliest tokens.", type=click.IntRange(min=1), metavar="N"),
    option("--penalty-alpha", "Contrastive search among the --top-k likeliest: how much likeness to what was said counts.",
           type=click.FloatRange(0, 1, min_open=True), metavar="X"),
)  # fmt: skip
FIELDS = (*MODEL_FIELDS, "max_new_tokens", "seed")


def flags() -> Flags:
    return Flags("generate", ABOUT, usage='MODEL "PROMPT" [FLAGS]', fields=(*FIELDS, "json_output"), own=SAMPLING)


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    if len(typed.words) != 2:
        raise UserError(
            f'a model and a prompt are needed, and {len(typed.words)} words were given: fleetune generate MODEL "..."'
        )
    model, prompt = typed.words
    spec = read_spec(typed, model)
    settings = sampling(spec, typed)
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise UserError("the prompt is empty: write what the model should reply to")
    start_logging(spec)
    reply = opened(spec).reply(conversation(typed, prompt), settings, None if spec.output.json_output else write)
    print(json.dumps({"reply": reply}, ensure_ascii=False) if spec.output.json_output else "")
    return EXIT_DONE


def opened(spec: RunSpec) -> Generator:
    """The model of the spec, ready to reply in this process. Raises UserError."""
    from fleetune.training.evaluation import load_for_reading
    from fleetune.training.generation import Generator
    from fleetune.training.sources import ModelRequest, prepare_source, tokenizer_of

    weights = spec.weights
    request = ModelRequest(
        model=weights.model,
        revision=weights.revision,
        offline=weights.offline,
        allow_remote_code=weights.allow_remote_code,
        precision=weights.precision,
        chat_template=weights.chat_template,
    )
    device = device_of(spec)
    source = prepare_source(request, device=device)
    model = load_for_reading(source, request, device=device, threads=spec.layout.threads)
    return Generator(model, tokenizer_of(source, request))


#: How a reply is drawn, beside its length; a preset gives all of it, or a person does.
_DRAWING = ("temperature", "top_p", "top_k", "penalty_alpha")


def sampling(spec: RunSpec, typed: Typed) -> Sampling:
    """What was typed; where nothing was, what the model's preset gives; else greedy decoding. Raises UserError."""
    return drawn(spec, {name: typed.own[name] for name in _DRAWING}, has_length="max_new_tokens" in typed.fields)


def drawn(spec: RunSpec, given: Mapping[str, Any], *, has_length: bool) -> Sampling:
    """given: values of temperature, top_p, top_k and penalty_alpha, None where nothing was said. has_length: whether the
    length of the reply is somebody's choice, which a preset's does not change. Raises UserError."""
    from fleetune.training.generation import Sampling

    preset = generation_of(spec)
    said = {name: value for name, value in given.items() if value is not None}
    chosen = said or {name: preset[name] for name in _DRAWING if name in preset}
    if "penalty_alpha" in chosen and chosen.get("top_k", 0) < 2:
        raise UserError("penalty_alpha is contrastive search, which needs candidates: give --top-k 4, or another above 1")
    if "penalty_alpha" in chosen and {"temperature", "top_p"} & set(chosen):
        raise UserError("penalty_alpha chooses without chance, and temperature and top_p draw: give one or the other")
    if {"top_p", "top_k"} & set(said) and not said.get("temperature") and "penalty_alpha" not in said:
        raise UserError("top_p and top_k limit what is drawn, and temperature 0 draws nothing: give --temperature above 0 too")
    length = spec.output.max_new_tokens if has_length else preset.get("max_new_tokens", spec.output.max_new_tokens)
    return Sampling(max_new_tokens=length, seed=spec.optimization.seed, **chosen)


def generation_of(spec: RunSpec) -> dict[str, Any]:
    """How the preset of a model, or of the run that the model is, lets it reply; empty where there is none."""
    from fleetune.cli.intent import preset_of
    from fleetune.spec.read import read_run
    from fleetune.spec.run_folder import RunFolder

    folder = RunFolder(Path(spec.weights.model).expanduser())
    weights = read_run(folder).spec.weights if folder.exists() else spec.weights
    preset = preset_of(weights)
    return preset.generation if preset else {}


def conversation(typed: Typed, prompt: str) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": typed.own["system"]}] if typed.own["system"] else []
    return [*system, {"role": "user", "content": prompt}]


def write(text: str) -> None:
    """A piece of a reply on standard output, at once; control characters must not steer the terminal."""
    from fleetune.monitor.figures import printable

    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
