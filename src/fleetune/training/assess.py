"""How good the model is on the held-out rows, with all ranks: loss, perplexity, and answers that are exactly right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fleetune.spec.records import MicroBatch
from fleetune.training.answers import Generate, Question, Reply, Tell, ask, nobody

#: Prompts answered at once: enough to fill the matrix products, few enough for a laptop's memory.
ANSWER_BATCH = 32


def perplexity(loss: float) -> float:
    """exp(loss), at most the largest float: a random model's loss must not end a run."""
    return math.exp(min(loss, 700.0))


class Stopped(Exception):
    """Somebody was asked to stop while an evaluation ran; what it had found is given up."""


class Ranks(Protocol):
    """What an assessment needs to know of the other ranks."""

    @property
    def data_rank(self) -> int: ...
    @property
    def data_ranks(self) -> int: ...
    def any(self, flag: bool) -> bool: ...
    def gather_json(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Assessment:
    """As `fleetune evaluate --json` prints it. exact_match is a share (0 to 1), None where nobody asked for it."""

    loss: float
    perplexity: float
    exact_match: float | None
    rows: int
    trained_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def held_out_loss(
    evaluate: Callable[[Sequence[MicroBatch]], tuple[float, int]],
    batches: Iterable[MicroBatch],
    ranks: Ranks,
    stop_requested: Callable[[], bool] = lambda: False,
    *,
    chunk: int = 8,
) -> tuple[float, int]:
    """(mean loss per trained token, trained tokens) over all ranks. All ranks; each gives its own micro-batches.

    Ranks may have unequal numbers of micro-batches: they agree after each chunk whether anybody has more. Raises Stopped.
    """
    total, count = 0.0, 0
    iterator: Iterator[MicroBatch] = iter(batches)
    while True:
        taken = [batch for _, batch in zip(range(chunk), iterator)]
        if not ranks.any(bool(taken)):
            break
        loss_sum, trained = evaluate(taken)
        total, count = total + loss_sum, count + trained
        if ranks.any(stop_requested()):
            raise Stopped
    return (total / count if count else float("nan")), count


def answer_all(
    questions: Sequence[Question],
    generate: Generate | None,
    tokenizer: Any,
    ranks: Ranks,
    *,
    max_new_tokens: int,
    lockstep: bool = False,
    tell: Tell = nobody,
) -> list[Reply]:
    """All ranks answer their share; every rank gets all replies, in the order of the rows. `tell` hears of this rank's own.

    generate: None where another rank answers this one's share. lockstep: all ranks must generate equally often, so one with
    a smaller share answers others' questions once more.
    """
    mine = list(questions[ranks.data_rank :: ranks.data_ranks])
    own = {question.sample for question in mine}
    if lockstep:
        mine += questions[: -(-len(questions) // ranks.data_ranks) - len(mine)]
    said: Iterable[Reply] = ()
    if generate is not None:
        said = ask(mine, generate, tokenizer, max_new_tokens=max_new_tokens, batch=ANSWER_BATCH, tell=tell)
    replies = [asdict(reply) for reply in said if reply.sample in own]
    found = {reply["sample"]: Reply(**reply) for part in ranks.gather_json(replies) for reply in part}
    return [found[question.sample] for question in questions]


def assessment(loss: float, trained_tokens: int, rows: int, replies: Sequence[Reply] | None) -> Assessment:
    exact = None
    if replies:
        exact = sum(reply.right for reply in replies) / len(replies)
    return Assessment(loss, perplexity(loss), exact, rows, trained_tokens)
