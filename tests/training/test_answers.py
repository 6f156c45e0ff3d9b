from __future__ import annotations

import numpy as np
import pytest

from fleetune.training.answers import Question, Reply, ask, question_of
from fleetune.training.assess import Stopped, answer_all, assessment, held_out_loss
from fleetune.training.evaluation import OneRank
from fleetune.training.generation import until_stop


def bits(text: str) -> np.ndarray:
    return np.array([character == "1" for character in text])


def test_the_question_ends_where_the_last_answer_begins():
    question = question_of("f:1", np.arange(8), bits("00110110"))
    assert question is not None
    assert question.prompt == (0, 1, 2, 3, 4) and question.answer == (5, 6)


def test_plain_text_is_no_question():
    assert question_of("f:1", np.arange(5), bits("01111")) is None
    assert question_of("f:1", np.arange(5), bits("00000")) is None


class Words:
    """A tokenizer of one character per token, with 0 as the end of a turn."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(96 + token) for token in tokens if token)


def test_an_answer_counts_only_to_the_letter_and_replies_come_back_in_order():
    questions = [Question("f:1", (1, 2, 3), (4, 0)), Question("f:2", (1,), (5, 0)), Question("f:3", (1, 2), (6, 0))]
    said = {(1, 2, 3): [4], (1,): [5, 5], (1, 2): [6]}
    asked: list[int] = []

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        asked.append(max_new_tokens)
        return [said[tuple(prompt)] for prompt in prompts]

    replies = answer_all(questions, generate, Words(), OneRank(), max_new_tokens=7)
    assert [reply.sample for reply in replies] == ["f:1", "f:2", "f:3"]
    assert [reply.right for reply in replies] == [True, False, True]
    assert assessment(1.0, 6, 3, replies).exact_match == pytest.approx(2 / 3)
    assert asked == [7]


def test_batches_hold_prompts_of_similar_length():
    questions = [Question(f"f:{n}", (1,) * n, (2, 0)) for n in (9, 1, 8, 2)]
    lengths: list[list[int]] = []

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        lengths.append([len(prompt) for prompt in prompts])
        return [[2] for _ in prompts]

    assert all(reply.right for reply in ask(questions, generate, Words(), max_new_tokens=4, batch=2))
    assert lengths == [[1, 2], [8, 9]]


def test_white_space_around_an_answer_does_not_count():
    assert Reply("f:1", "", "yes", " yes\n").right and not Reply("f:1", "", "yes", "yes.").right


def test_tokens_after_the_end_of_a_turn_are_cut():
    assert until_stop([4, 5, 0, 6, 0], {0}) == [4, 5]
    assert until_stop([4, 5], {0}) == [4, 5]


def test_the_mean_is_over_all_tokens_not_over_batches():
    sums = iter([(10.0, 1), (2.0, 3)])
    loss, count = held_out_loss(lambda batches: next(sums), [object(), object()], OneRank(), chunk=1)  # type: ignore[list-item]
    assert (loss, count) == (3.0, 4)


def test_an_evaluation_gives_up_within_a_chunk_when_asked_to_stop():
    read = []

    def batches():
        for number in range(100):
            read.append(number)
            yield object()

    with pytest.raises(Stopped):
        held_out_loss(lambda taken: (1.0, 1), batches(), OneRank(), lambda: len(read) > 10, chunk=4)
    assert len(read) < 20
