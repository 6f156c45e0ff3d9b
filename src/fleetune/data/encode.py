"""From rendered text to token ids and what is trained of them, in batches, with the tokenizer's own parallelism."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetune.data.chat_format import ChatFormat, plain_template
from fleetune.data.literals import Literals, Rendered
from fleetune.data.sandbox import Refused
from fleetune.spec.errors import UserError


@dataclass(frozen=True)
class Encoded:
    """tokens: int32 [L]; trained: bool [L], its first never. turns: trained turns of the assistant; ended: those whose last
    trained token is a control token (the end of the turn). double_bos: a second begin-of-text token was left out. end_added:
    the template has no end of turn, so an end-of-text token was put after the last answer."""

    tokens: np.ndarray
    trained: np.ndarray
    turns: int = 0
    ended: int = 0
    double_bos: bool = False
    end_added: bool = False


class Encoder:
    """Token ids of one tokenizer (a fast one of transformers). It works on a copy: the tokenizer itself stays as it is."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"the tokenizer {type(tokenizer).__name__} has no fast form (tokenizer.json), which tells where each token "
                "stands in the text: choose a model that has one"
            )
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.eos = tokenizer.eos_token_id
        self.bos = tokenizer.bos_token_id
        self.control_ids = frozenset(special) | ({self.eos} if self.eos is not None else set())
        self._is_control = np.zeros(
            max([self._backend.get_vocab_size(), *(number + 1 for number in self.control_ids)]), dtype=bool
        )
        self._is_control[list(self.control_ids)] = True
        self.literals = Literals(special.values())
        with_specials = self._backend.encode("a", add_special_tokens=True).ids
        plain = self._backend.encode("a", add_special_tokens=False).ids
        self.start = with_specials[: _find(with_specials, plain)]

    def chat_format(self, tokenizer: Any) -> ChatFormat:
        """The tokenizer's chat template, or the plain format where it has none. Raises UserError for an invalid one."""
        constants = dict(tokenizer.special_tokens_map)
        try:
            if tokenizer.chat_template is None:
                return ChatFormat(self.plain_template(), constants, is_plain=True)
            template = tokenizer.get_chat_template()
            with_tools = tokenizer.get_chat_template(tools=[{}])
            return ChatFormat(template, constants, tool_template=with_tools if with_tools != template else None)
        except (Refused, ValueError) as error:
            raise UserError(f"{error}: give another one with --chat-template FILE") from error

    def plain_template(self) -> str:
        """The chat template of a tokenizer that has none: rows are written with it, so whoever asks the model needs it too."""
        return plain_template(starts_with_bos=self.bos is not None and self.bos in self.start)

    def encode_texts(self, texts: Sequence[str]) -> list[Encoded]:
        """Plain texts, trained from the first to the last token, which is the end of text. Control tokens stay text."""
        self._backend.encode_special_tokens = True
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = False
        ending = [self.eos] if self.eos is not None else []
        encoded = []
        for encoding in encodings:
            tokens = np.array([*self.start, *encoding.ids, *ending], dtype=np.int32)
            trained = np.ones(len(tokens), dtype=bool)
            trained[: max(1, len(self.start))] = False
            encoded.append(Encoded(tokens, trained))
        return encoded

    def encode(self, parts: Sequence[Rendered]) -> list[Encoded | Refused]:
        """Rendered conversations; Refused in the place of one whose literal control tokens cannot be kept as text."""
        texts = [_filled(part) for part in parts]
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        encoded: list[Encoded | Refused] = []
        for part, text, encoding in zip(parts, texts, encodings):
            ids = np.array(encoding.ids, dtype=np.int64)
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            try:
                if part.literals:
                    ids, offsets = self._with_literals(part, text, ids, offsets)
                encoded.append(self._marked(part, ids, offsets))
            except Refused as refused:
                encoded.append(refused)
        return encoded

    def _with_literals(
        self, part: Rendered, filled: str, ids: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids in which the control tokens of `part.literals` are spelled out. filled: the text without them, as `ids`.

        Tokenizers cut the text at control tokens and treat each piece by itself; so only the pieces with a literal are
        encoded again, with control tokens switched off.
        """
        borders = np.flatnonzero(self._is_control[ids])
        all_ids, all_offsets = [], []
        first = 0
        for border in [*borders.tolist(), len(ids)]:
            start = int(offsets[first - 1, 1]) if first else 0
            end = int(offsets[border, 0]) if border < len(ids) else len(filled)
            piece_ids, piece_offsets = ids[first:border], offsets[first:border]
            if any(start <= place < end for place, _ in part.literals):
                piece_ids, piece_offsets = self._spelled(part.text[start:end], filled[start:end], piece_ids)
                piece_offsets = piece_offsets + start
            all_ids += [piece_ids, ids[border : border + 1]]
            all_offsets += [piece_offsets, offsets[border : border + 1]]
            first = border + 1
        return np.concatenate(all_ids), np.concatenate(all_offsets)

    def _spelled(self, text: str, filled: str, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids and offsets of `text` with control tokens as text. `expected`: what `filled` is within its own text, by which
        it is proved that the piece may be encoded by itself (some tokenizers treat the beginning of a text in its own way)."""
        self._backend.encode_special_tokens = True
        try:
            for guard in ("", "\n"):
                skip = len(self._backend.encode(guard, add_special_tokens=False).ids) if guard else 0
                if self._backend.encode(guard + filled, add_special_tokens=False).ids[skip:] == expected.tolist():
                    encoding = self._backend.encode(guard + text, add_special_tokens=False)
                    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[skip:] - len(guard)
                    return np.array(encoding.ids[skip:], dtype=np.int64), offsets
        finally:
            self._backend.encode_special_tokens = False
        raise Refused("holds a control token of the model as text, which this tokenizer cannot write as text: rephrase it")

    def _marked(self, part: Rendered, ids: np.ndarray, offsets: np.ndarray) -> Encoded:
        """Which tokens are trained: those that begin in an answer, to its last control token (the end of the turn)."""
        trained = np.zeros(len(ids), dtype=bool)
        is_control = self._is_control[ids]
        ended = turns = first = last = end = 0
        for start, end in part.answers:
            first, last = self._token_range(part, start, end, ids, offsets, is_control)
            if last > first:
                trained[first:last] = True
                turns += 1
                ended += bool(is_control[last - 1])
        end_added = turns > 0 and not is_control[last - 1] and self.eos is not None and not part.text[end:].strip()
        if end_added:
            # Without an end there is nothing to stop at: the one deviation from the template's own rendering, and told.
            ids, trained = np.append(ids[:last], self.eos), np.append(trained[:last], True)
            ended += 1
        if part.is_whole:
            trained[:] = True
        double_bos = bool(self.bos is not None and len(ids) > 1 and ids[0] == ids[1] == self.bos)
        if double_bos:
            ids, trained = ids[1:], trained[1:]
        trained[:1] = False
        return Encoded(ids.astype(np.int32), trained, turns, ended, double_bos, end_added)

    def _token_range(
        self, part: Rendered, start: int, end: int, ids: np.ndarray, offsets: np.ndarray, is_control: np.ndarray
    ) -> tuple[int, int]:
        """The trained tokens [first, last) of the answer at characters [start, end)."""
        text = part.text
        first = int(np.searchsorted(offsets[:, 0], start, side="left"))
        last = int(np.searchsorted(offsets[:, 0], end, side="left"))
        if first > 0 and offsets[first - 1, 1] > start and text[offsets[first - 1, 0] : start].isspace():
            first -= 1  # one token of the prompt's last space and the answer's first word: the word is the answer's
        if last < len(ids) and part.is_marked and ids[last] == self.eos and last > first and not is_control[last - 1]:
            last += 1  # a template that leaves the end of the turn out of its marks would never teach to stop
        controls = np.flatnonzero(is_control[first:last])
        if controls.size:
            closing = first + int(controls[-1])
            if not text[int(offsets[closing, 1]) : end].strip():
                last = closing + 1  # a line end after the end of the turn is never the model's to say
        return first, last


def _filled(part: Rendered) -> str:
    """The text with each literal overwritten by letters: the same length, and no control token."""
    text = part.text
    for start, end in part.literals:
        text = text[:start] + "x" * (end - start) + text[end:]
    return text


def _find(longer: list[int], shorter: list[int]) -> int:
    """Where `shorter` begins in `longer`; 0 where it does not occur."""
    places: Iterable[int] = range(len(longer) - len(shorter) + 1)
    return next((place for place in places if longer[place : place + len(shorter)] == shorter), 0)
