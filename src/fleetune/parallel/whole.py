"""The whole model for a while, where ranks hold parts of it: what replies are generated with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel
    from fleetune.models.wanted import WantedModel
    from fleetune.parallel.engine import Engine
    from fleetune.parallel.world import World

#: All ranks enter it at the same point. Gives a whole model in eval mode, or None on a rank that leaves the replies of its
#: share to another.
WholeModel = Callable[[], AbstractContextManager["CausalModel | None"]]


@contextmanager
def gathered(wanted: WantedModel, engine: Engine, world: World) -> Iterator[CausalModel | None]:
    """A model of its own with the engine's weights, on the first rank of each share, as long as it is needed.

    Its memory comes on top of what the rank holds: frozen weights are the mapped pages that are there anyway on a CPU, and
    a copy on a GPU; what is trained is a copy. Raises whatever a device does that has no room for it.
    """
    from fleetune.models.wanted import load_whole

    model = load_whole(wanted, world.device) if world.layout.speaks(world.rank) else None
    named = {} if model is None else dict(model.trained())
    with torch.no_grad():
        for name, tensor in engine.full_tensors():
            if model is not None:
                named[name].copy_(tensor)
    if model is not None:
        model.eval()
    yield model
