"""Which engine runs which layout. `parallel/engines.py` says where each of them is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetune.planning.zero import is_deepspeed
from fleetune.spec.layout import Layout
from fleetune.spec.run_spec import RunSpec


@dataclass(frozen=True)
class EngineKind:
    """name: as the registry in `parallel/` knows it. takes: whether it is the one for this run."""

    name: str
    takes: Callable[[RunSpec, Layout], bool]


#: The first one that takes a run is its engine.
ENGINE_KINDS = (
    EngineKind("deepspeed", lambda spec, layout: is_deepspeed(spec)),
    EngineKind("replicated", lambda spec, layout: layout == Layout(replicate=layout.replicate)),
    EngineKind("sharded", lambda spec, layout: layout.pipeline == 1),
    EngineKind("pipelined", lambda spec, layout: layout.pipeline > 1),
)


def choose_engine(spec: RunSpec, layout: Layout) -> str:
    """The name of the engine of a run. What it cannot combine is refused by the rules (`combinations.py`)."""
    return next(kind.name for kind in ENGINE_KINDS if kind.takes(spec, layout))
