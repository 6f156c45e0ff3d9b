"""The engines by name. Each module has one factory, `build(EngineRequest) -> Built`, that loads the model in its own way.

Names and what they take are in `planning/engines.py`, which a login node without torch can ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel
    from fleetune.models.wanted import WantedModel
    from fleetune.parallel.engine import Engine
    from fleetune.parallel.native import StepSettings
    from fleetune.parallel.optimizer_state import OptimizerFactory
    from fleetune.parallel.whole import WholeModel
    from fleetune.parallel.world import World
    from fleetune.parallel.zero_settings import ZeroSettings

#: Name -> module; imported only when its engine is wanted.
MODULES = {
    "deepspeed": "fleetune.parallel.zero",
    "replicated": "fleetune.parallel.native",
    "sharded": "fleetune.parallel.sharded",
    "pipelined": "fleetune.parallel.pipelined",
}


@dataclass(frozen=True)
class PipeSettings:
    """schedule: `1f1b` or `interleaved`. micro_batch_tokens: the most that a micro-batch holds."""

    schedule: str
    micro_batch_tokens: int


@dataclass(frozen=True)
class EngineRequest:
    """What an engine is made of. world: all ranks, with the layout. model: which one, not yet loaded.

    zero: how DeepSpeed shares out the training state; pipe: of a pipeline; None for the other engines.
    """

    world: World
    model: WantedModel
    optimizer: OptimizerFactory
    settings: StepSettings
    zero: ZeroSettings | None = None
    pipe: PipeSettings | None = None


@dataclass(frozen=True)
class Built:
    """The model as this rank holds it, and the engine over it.

    whole: how a model is had that replies (through `Engine.live`), where this rank's own cannot.
    """

    model: CausalModel
    engine: Engine
    whole: WholeModel | None = None


def build_engine(name: str, request: EngineRequest) -> Built:
    """Load the model and build the engine over it. All ranks."""
    built: Built = import_module(MODULES[name]).build(request)
    return built
