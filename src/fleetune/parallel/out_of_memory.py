"""Memory that runs out in the middle of a step: recognised, agreed on by all ranks, and given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from fleetune.parallel.world import World

#: What torch says on a CPU and what drivers say, in errors that have no class of their own.
_PHRASES = ("can't allocate memory", "cannot allocate memory", "out of memory", "not enough memory", "std::bad_alloc")

Result = TypeVar("Result")


class OutOfMemory(Exception):
    """A step did not fit into the memory of some rank. Raised on all ranks, with nothing changed: it can be done again."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)


def together(world: World, compute: Callable[[], Result]) -> Result:
    """`compute()`, which takes part in no collective. All ranks. Where memory runs out on any, raises OutOfMemory on all."""
    result, cause = None, ""
    try:
        result = compute()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        cause = f"rank {world.rank} (node {world.node}): {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    # Here the error and the frames that it held are gone, and with them the activations.
    if not world.any(bool(cause)):
        return result  # type: ignore[return-value]
    del result
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    raise OutOfMemory("; ".join(filter(None, world.gather_json(cause))))
