"""How a model comes to be in pieces: built without memory, cut, and each rank reads its own pieces of the weights."""

from __future__ import annotations

from fleetune.models.objective import TokenLoss
from fleetune.models.pieces import WeightPieces, empty_model, tied_names
from fleetune.parallel.engines import Built, EngineRequest
from fleetune.parallel.full_shard import allocate, shard_fully
from fleetune.parallel.native import forward_of
from fleetune.parallel.pieces import Pieces, put_in
from fleetune.parallel.sharded_engine import ShardedEngine
from fleetune.parallel.tensor_parallel import cut_tensors


def build(request: EngineRequest) -> Built:
    """The model in pieces, and the engine over it. All ranks."""
    world = request.world
    model = empty_model(request.model, world.device)
    source = WeightPieces(model, request.model)
    tied = tied_names(model.module)
    cuts = cut_tensors(model, world)
    root = shard_fully(model, world)
    allocate(root, tied, world.device)
    pieces = Pieces(model.module, cuts, shard_ranks=world.layout.shard, shard_rank=world.coordinates.shard)
    put_in(pieces, source.read)
    engine = ShardedEngine(
        model,
        forward_of(model, TokenLoss()),
        root=root,
        pieces=pieces,
        world=world,
        optimizer=request.optimizer,
        settings=request.settings,
    )
    return Built(model, engine)
