"""Control tokens that are written out in a row's own text stay text: a row cannot end its turn or open another one.

Before rendering, each literal is swapped for a word that means nothing to template and tokenizer; afterwards its place in
the rendered text is known, and the tokenizer is kept from reading a control token there (`encode.py`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fleetune.data.conversations import Conversation

_NONCE = secrets.token_hex(8)
_WORD = re.compile(f"Lit{_NONCE}n([0-9]+)e")


@dataclass(frozen=True)
class Rendered:
    """A rendered text and what of it is trained; all bounds are character offsets [start, end).

    answers: one span for each turn of the assistant that is trained. literals: control tokens that are only text here.
    is_marked: the spans are the template's own `{% generation %}` marks. is_whole: everything is trained, prompts too.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    literals: tuple[tuple[int, int], ...] = ()
    is_marked: bool = False
    is_whole: bool = False


class Literals:
    """Finds the control tokens of one tokenizer in the texts of rows."""

    def __init__(self, control_tokens: Iterable[str]) -> None:
        longest_first = sorted((token for token in control_tokens if token.strip()), key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(re.escape(token) for token in longest_first)) if longest_first else None

    def count(self, text: str) -> int:
        return sum(1 for _ in self._pattern.finditer(text)) if self._pattern else 0

    def hide(self, conversation: Conversation) -> tuple[Conversation, list[str]]:
        """The conversation with every literal swapped for a word, and the literals; the same object where there are none."""
        found: list[str] = []
        messages = tuple(self._hidden(message, found, keep=("role", "type")) for message in conversation.messages)
        tools = tuple(self._hidden(tool, found) for tool in conversation.tools) if conversation.tools else conversation.tools
        return (Conversation(messages, tools), found) if found else (conversation, found)

    def _hidden(self, value: Any, found: list[str], keep: tuple[str, ...] = ()) -> Any:
        if isinstance(value, str):
            return self._swap(value, found)
        if isinstance(value, dict):
            return {self._swap(key, found): item if key in keep else self._hidden(item, found) for key, item in value.items()}
        if isinstance(value, list):
            return [self._hidden(item, found) for item in value]
        return value

    def _swap(self, text: str, found: list[str]) -> str:
        if self._pattern is None or not self._pattern.search(text):
            return text

        def word(literal: re.Match[str]) -> str:
            found.append(literal.group())
            return f"Lit{_NONCE}n{len(found) - 1}e"

        return self._pattern.sub(word, text)


def restore(rendered: Rendered, literals: list[str]) -> Rendered:
    """`rendered` with the words swapped back, and every bound moved along."""
    if not literals:
        return rendered
    pieces: list[str] = []
    places: list[tuple[int, int]] = []
    moves: list[tuple[int, int]] = []  # (offset in the rendered text, how far everything from there on has moved)
    length = end = 0
    for word in _WORD.finditer(rendered.text):
        literal = literals[int(word.group(1))]
        pieces += [rendered.text[end : word.start()], literal]
        length += word.start() - end
        places.append((length, length + len(literal)))
        length += len(literal)
        end = word.end()
        moves.append((end, length - end))
    pieces.append(rendered.text[end:])

    def moved(bound: int) -> int:
        return bound + next((by for offset, by in reversed(moves) if offset <= bound), 0)

    answers = tuple((moved(start), moved(stop)) for start, stop in rendered.answers)
    return Rendered("".join(pieces), answers, tuple(places), rendered.is_marked, rendered.is_whole)
