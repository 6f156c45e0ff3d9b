"""Rotary frequencies that change with the longest document of a forward: the one way in which documents of a micro-batch
could still change each other, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetune.spec.errors import UserError


@dataclass(frozen=True)
class LengthSwitch:
    """Beyond `limit` tokens other frequencies hold for the whole forward, and (`lasting`) for later ones too."""

    limit: int
    lasting: bool

    @staticmethod
    def of(config: Any) -> LengthSwitch | None:
        """What transformers' rotary types do, or None: `longrope` has two sets, `dynamic` grows with the longest so far."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        parameters = getattr(text, "rope_parameters", None) or {}
        switches = [
            LengthSwitch(int(text.max_position_embeddings), True)
            if one["rope_type"] == "dynamic"
            else LengthSwitch(int(one["original_max_position_embeddings"]), False)
            for one in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
            if one.get("rope_type") in ("longrope", "dynamic")
        ]
        return min(switches, key=lambda switch: switch.limit, default=None)

    def check(self, lengths: np.ndarray) -> None:
        """Raise UserError if documents of these lengths would change each other."""
        if lengths.size == 0 or lengths.max() <= self.limit or (lengths.min() > self.limit and not self.lasting):
            return
        whom = "later ones" if self.lasting else f"one of {lengths.min()} tokens in the same micro-batch"
        fix = "" if self.lasting else ", or --micro-batch-size 1 without packing"
        raise UserError(
            f"a document of {lengths.max()} tokens is longer than {self.limit}, beyond which this model changes its rotary "
            f"frequencies, and so it would change {whom}: give --sequence-length {self.limit} or less{fix}"
        )
