"""Contrastive search: the next token is likely, and unlike what was said before (Su et al. 2022, arXiv 2202.06417).

Of the `top_k` likeliest tokens v, the one is taken with the highest

    (1 - penalty_alpha) * p(v | before) - penalty_alpha * max_j cos(h_v, h_j)

where h_j are the last layer's states of the tokens before, and h_v the state of v itself. Nothing is drawn at random.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Contrast:
    """penalty_alpha: weight of the likeness, above 0 and at most 1. top_k: how many candidates, at least 2."""

    penalty_alpha: float
    top_k: int

    def __post_init__(self) -> None:
        if not 0 < self.penalty_alpha <= 1 or self.top_k < 2:
            raise ValueError(f"penalty_alpha {self.penalty_alpha} must be in (0, 1], and top_k {self.top_k} at least 2")


def contrastive_search(
    module: Any,
    prompt: list[int],
    *,
    contrast: Contrast,
    stop: set[int],
    max_new_tokens: int,
    on_token: Callable[[int], None] = lambda token: None,
) -> list[int]:
    """New tokens after `prompt` (at least one token), without the one in `stop` that ends them.

    module: a plain transformers causal model. Where it keeps a cache that can be repeated and selected, each token costs one
    forward pass of `top_k` single tokens; else the whole text is read again. on_token: gets each token as it is chosen.
    """
    import torch

    text = _Text(module, prompt)
    found: list[int] = []
    with torch.no_grad():
        while len(found) < max_new_tokens:
            probabilities, candidates = torch.softmax(text.logits.float(), dim=-1).topk(
                min(contrast.top_k, text.logits.shape[-1])
            )
            ahead = text.look_ahead(candidates)
            likeness = (_unit(ahead.states) @ text.directions.T).amax(dim=1)
            scores = (1 - contrast.penalty_alpha) * probabilities - contrast.penalty_alpha * likeness
            best = int(scores.argmax())
            token = int(candidates[best])
            if token in stop:
                break
            found.append(token)
            on_token(token)
            text.take(ahead, best, token)
    return found


@dataclass(frozen=True)
class _Ahead:
    """What follows each candidate. states: [K, H] of the candidates; logits: [K, V] of what comes after them."""

    states: torch.Tensor
    logits: torch.Tensor
    cache: Any


class _Text:
    """The text so far as the model sees it. directions: fp32 [T, H], the states of its tokens at length 1."""

    def __init__(self, module: Any, prompt: list[int]) -> None:
        import torch

        self._module = module
        self._device = next(module.parameters()).device
        self._tokens = list(prompt)
        tokens = torch.tensor([prompt], device=self._device)
        out = module(input_ids=tokens, use_cache=True, output_hidden_states=True)
        cache = getattr(out, "past_key_values", None)
        self._cache = cache if _branches(cache) else None
        # transformers has renamed the argument.
        known = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self.logits = out.logits[0, -1]
        self.directions = _unit(out.hidden_states[-1][0])

    def look_ahead(self, candidates: torch.Tensor) -> _Ahead:
        """The states of the candidates (int64 [K]) and what would follow each."""
        import torch

        count = len(candidates)
        if self._cache is None:
            before = torch.tensor([self._tokens], device=self._device).expand(count, -1)
            tokens = torch.cat([before, candidates[:, None]], dim=1)
            out = self._module(input_ids=tokens, use_cache=False, output_hidden_states=True)
        else:
            self._cache.batch_repeat_interleave(count)
            mask = torch.ones((count, len(self._tokens) + 1), dtype=torch.int64, device=self._device)
            out = self._module(
                input_ids=candidates[:, None],
                attention_mask=mask,
                **{self._cache_argument: self._cache},
                use_cache=True,
                output_hidden_states=True,
            )
        return _Ahead(out.hidden_states[-1][:, -1], out.logits[:, -1], self._cache)

    def take(self, ahead: _Ahead, best: int, token: int) -> None:
        """Go on with candidate number `best`, which is `token`."""
        import torch

        if ahead.cache is not None:
            ahead.cache.batch_select_indices(torch.tensor([best], device=self._device))
        self._tokens.append(token)
        self.logits = ahead.logits[best]
        self.directions = torch.cat([self.directions, _unit(ahead.states[best : best + 1])])


def _branches(cache: Any) -> bool:
    """Whether every layer of a cache can be repeated for the candidates and cut to the chosen one. Recurrent states cannot."""
    layers = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer).__name__.startswith("Dynamic") for layer in layers)


def _unit(states: torch.Tensor) -> torch.Tensor:
    """fp32 rows of length 1."""
    import torch

    return torch.nn.functional.normalize(states.float(), dim=-1)
