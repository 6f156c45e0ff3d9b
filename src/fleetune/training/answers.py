"""Exact match: the model answers held-out rows, and an answer counts when it is the row's own, to the letter.

Prompt and wanted answer are cut from the token store: the prompt a model is asked with is exactly the one it was trained
on, token for token, whatever its chat template does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: generate(prompts: list of token lists, max_new_tokens) -> the new tokens of each, to the end of the turn.
Generate = Callable[[list[list[int]], int], list[list[int]]]

#: Is told how far a long evaluation is: (what is being done, rows that are done, rows in all).
Tell = Callable[[str, int, int], None]


def nobody(what: str, done: int, total: int) -> None:
    """Where nobody is told."""


@dataclass(frozen=True)
class Question:
    """One held-out row as a question: `prompt` tokens, and the `answer` tokens that end the row."""

    sample: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """What was asked, what was wanted, and what the model said (as text)."""

    sample: str
    prompt: str
    wanted: str
    said: str

    @property
    def right(self) -> bool:
        return self.said.strip() == self.wanted.strip()


def question_of(sample: str, tokens: np.ndarray, trained: np.ndarray) -> Question | None:
    """The last trained run of tokens as the answer, all before it as the prompt; None for a row without a prompt.

    tokens: int [L]; trained: bool [L]. Text that the template adds after the answer is left out.
    """
    targets = np.flatnonzero(trained)
    if targets.size == 0:
        return None
    end = int(targets[-1]) + 1
    gaps = np.flatnonzero(~trained[:end])
    start = int(gaps[-1]) + 1
    if start < 2:  # plain text: every token but the first is trained, there is nothing to ask
        return None
    return Question(sample, tuple(int(t) for t in tokens[:start]), tuple(int(t) for t in tokens[start:end]))


def ask(
    questions: Sequence[Question],
    generate: Generate,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    batch: int,
    tell: Tell = nobody,
) -> Iterator[Reply]:
    """Answers to the questions, in batches of similar length (padding is work), in the order they come out."""
    order = sorted(range(len(questions)), key=lambda index: len(questions[index].prompt))
    for start in range(0, len(order), batch):
        tell("answering held-out rows", start, len(order))
        chosen = [questions[index] for index in order[start : start + batch]]
        longest = min(max_new_tokens, 2 * max(len(question.answer) for question in chosen) + 16)
        for question, said in zip(chosen, generate([list(q.prompt) for q in chosen], longest)):
            decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
            yield Reply(question.sample, decode(list(question.prompt)), decode(list(question.answer)), decode(said))
