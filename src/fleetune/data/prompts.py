"""A prompt as tokens, exactly as rows are: one template for training and for answering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fleetune.data.conversations import Conversation
from fleetune.data.encode import Encoder
from fleetune.data.literals import Rendered, restore
from fleetune.data.sandbox import Refused
from fleetune.spec.errors import UserError


class Prompter:
    """Prompt tokens of one tokenizer. Make one and keep it: looking at a template takes a moment."""

    def __init__(self, tokenizer: Any) -> None:
        self._encoder = Encoder(tokenizer)
        self._format = self._encoder.chat_format(tokenizer)

    def __call__(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None) -> np.ndarray:
        """int32 [L]: `messages` (role, content) up to where the assistant's answer begins. Control tokens that are written
        out in a message stay text. Raises UserError where the chat template refuses the conversation."""
        asked = Conversation(tuple(dict(message) for message in messages), tuple(tools) if tools else None)
        hidden, literals = self._encoder.literals.hide(asked)
        try:
            adapted, adapted_tools = self._format.adapt(hidden)
            rendered = restore(Rendered(self._format.prompt(adapted, adapted_tools), ()), literals)
            encoded = self._encoder.encode([rendered])[0]
            if isinstance(encoded, Refused):
                raise encoded
        except Refused as error:
            raise UserError(f"the conversation cannot be put to the model: {error}") from error
        return encoded.tokens
