"""`fleetune generate`: one reply of a model, on standard output as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
    option("--temperature", "0 always takes the likeliest token.", type=click.FloatRange(min=0.0), default=0.0, metavar="X"),
    option("--top-p", "Draw from the likeliest tokens that hold this share.", type=click.FloatRange(0, 1, min_open=True),
           default=1.0, metavar="X"),
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
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise UserError("the prompt is empty: write what the model should reply to")
    start_logging(spec)
    reply = opened(spec).reply(conversation(typed, prompt), sampling(spec, typed), None if spec.output.json_output else write)
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


def sampling(spec: RunSpec, typed: Typed) -> Sampling:
    from fleetune.training.generation import Sampling

    return Sampling(
        max_new_tokens=spec.output.max_new_tokens,
        temperature=typed.own["temperature"],
        top_p=typed.own["top_p"],
        seed=spec.optimization.seed,
    )


def conversation(typed: Typed, prompt: str) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": typed.own["system"]}] if typed.own["system"] else []
    return [*system, {"role": "user", "content": prompt}]


def write(text: str) -> None:
    """A piece of a reply on standard output, at once; control characters must not steer the terminal."""
    from fleetune.monitor.figures import printable

    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
