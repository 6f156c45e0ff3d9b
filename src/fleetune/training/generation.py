"""Replies: batched greedy decoding for exact match, and one conversation for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetune.data.prompts import Prompter
from fleetune.training.answers import Generate

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy decoding; top_p keeps the likeliest share of the mass, top_k the
    so many likeliest tokens (0: all). penalty_alpha above 0 is contrastive search among top_k, and nothing is drawn."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    penalty_alpha: float = 0.0
    seed: int = 0


def stop_tokens(model: CausalModel, tokenizer: Any) -> set[int]:
    """Tokens that end a reply: the tokenizer's end of text, and those of the model's generation settings."""
    settings = getattr(model.module, "generation_config", None)
    found: list[Any] = []
    for value in (tokenizer.eos_token_id, getattr(settings, "eos_token_id", None)):
        found += value if isinstance(value, list | tuple) else [value]
    return {int(token) for token in found if token is not None}


def greedy(model: CausalModel, tokenizer: Any, *, also_stop_at: Iterable[int] = (), lockstep: bool = False) -> Generate:
    """A function that answers a batch of prompts by greedy decoding, each to the end of its turn.

    lockstep: all ranks run it at the same time, and must make equally many forwards: to the end of the longest reply.
    """
    stop = stop_tokens(model, tokenizer) | set(also_stop_at)

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        sampling = Sampling(max_new_tokens=max_new_tokens)
        return generate_tokens(model, prompts, stop=stop, sampling=sampling, lockstep=lockstep)

    return generate


def generate_tokens(
    model: CausalModel,
    prompts: list[list[int]],
    *,
    stop: set[int],
    sampling: Sampling,
    streamer: Any = None,
    lockstep: bool = False,
) -> list[list[int]]:
    """New tokens of each prompt, without the one that stops it. Prompts of unequal length are padded on the left."""
    import torch

    if sampling.penalty_alpha > 0:
        return [_contrastive(model, prompt, stop, sampling, streamer) for prompt in prompts]
    longest = max(len(prompt) for prompt in prompts)
    padding = next(iter(stop), 0)
    tokens = torch.full((len(prompts), longest), padding, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
        mask[row, longest - len(prompt) :] = 1
    chosen: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature > 0:
        torch.manual_seed(sampling.seed)
        chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    with torch.no_grad(), model.own_attention() as module:
        out = module.generate(
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(stop) or None,
            pad_token_id=padding,
            streamer=streamer,
            synced_gpus=lockstep,
            **chosen,
        )
    return [until_stop(row[longest:].tolist(), stop) for row in out]


def _contrastive(model: CausalModel, prompt: list[int], stop: set[int], sampling: Sampling, streamer: Any) -> list[int]:
    from fleetune.models.contrastive import Contrast, contrastive_search

    def show(token: int) -> None:
        if streamer is not None:
            streamer.put(torch.tensor([token]))

    import torch

    contrast = Contrast(sampling.penalty_alpha, sampling.top_k)
    if streamer is not None:
        streamer.put(torch.tensor([prompt]))  # which it passes over, as `generate` gives it
    with model.own_attention() as module:
        found = contrastive_search(
            module, prompt, contrast=contrast, stop=stop, max_new_tokens=sampling.max_new_tokens, on_token=show
        )
    if streamer is not None:
        streamer.end()
    return found


def until_stop(tokens: list[int], stop: set[int]) -> list[int]:
    for position, token in enumerate(tokens):
        if token in stop:
            return tokens[:position]
    return tokens


class Generator:
    """A model that replies to conversations, in this process; asked with the very template it was trained with."""

    def __init__(self, model: CausalModel, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._stop = stop_tokens(model, tokenizer)
        self._prompter = Prompter(tokenizer)

    def replies(self, conversations: list[list[dict[str, Any]]], sampling: Sampling) -> list[str]:
        """The model's next turn in each of several conversations, which are read together."""
        prompts = [self._prompter(messages).tolist() for messages in conversations]
        said = generate_tokens(self._model, prompts, stop=self._stop, sampling=sampling)
        return [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in said]

    def reply(
        self, messages: list[dict[str, Any]], sampling: Sampling | None = None, on_text: Callable[[str], None] | None = None
    ) -> str:
        """The model's next turn. `on_text` gets each piece of text as it comes out."""
        prompt = self._prompter(messages).tolist()
        streamer = _streamer(self._tokenizer, on_text) if on_text else None
        (said,) = generate_tokens(self._model, [prompt], stop=self._stop, sampling=sampling or Sampling(), streamer=streamer)
        return self._tokenizer.decode(said, skip_special_tokens=True)


def _streamer(tokenizer: Any, on_text: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
