"""What the ranks of a test do: functions of (world, arguments) that give JSON."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from fleetune.parallel.native import forward_of
from fleetune.parallel.world import World
from fleetune.spec.errors import UserError
from fleetune.spec.layout import Layout
from fleetune.training.numbers import replicas_differ
from parallel import toy


def talk(world: World) -> dict[str, Any]:
    before = world.bytes_sent
    answer = {
        "rank": world.rank,
        "share": [world.data_rank, world.data_ranks],
        "sum": world.sum([1, world.rank, 2**53 / world.world_size]),
        "max": world.max([world.rank, -world.rank]),
        "any": [world.any(world.rank == world.world_size - 1), world.any(False)],
        "broadcast": world.broadcast_json({"von": "0", "ä": [1, None]} if world.rank == 0 else "not looked at"),
        "gather": world.gather_json({"rank": world.rank, "long": "ü" * (1 + 1000 * world.rank)}),
    }
    world.barrier()
    answer["bytes"] = world.bytes_sent - before
    return answer


def in_layouts(world: World) -> dict[str, Any]:
    """What a rank of two is told under each layout of two."""
    answer = {}
    for layout in (Layout(replicate=2), Layout(shard=2), Layout(tensor=2), Layout(pipeline=2)):
        inside = World(world.place, world.device, layout)
        mesh = inside.mesh
        answer[layout.describe()] = {
            "share": [inside.data_rank, inside.data_ranks],
            "shares": inside.sum_shares([1.0, 10.0 + inside.data_rank]),
            "mesh": [list(mesh.mesh_dim_names or ()), list(mesh.shape), mesh.get_coordinate()],
        }
    return answer


def listening_addresses(world: World) -> list[str]:
    world.barrier()
    return sorted({c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN})


def barrier_waits(world: World, folder: str) -> bool:
    """Whether the last rank's mark is there after the barrier, though it came late."""
    if world.rank == world.world_size - 1:
        time.sleep(0.5)
        open(os.path.join(folder, "late"), "w").close()
    world.barrier()
    return os.path.exists(os.path.join(folder, "late"))


def peer_dies(world: World) -> dict[str, Any]:
    """Rank 1 is killed while rank 0 waits for it; rank 0 must hear of it and be able to leave."""
    world.barrier()
    if world.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        world.sum([1.0])
        heard = None
    except RuntimeError as error:
        heard = str(error)
    noticed_s = time.monotonic() - began
    world.leave()
    return {"heard": heard, "noticed_s": noticed_s, "left_s": time.monotonic() - began - noticed_s}


def losses(world: World, num_steps: int, clip: float = 1.0) -> dict[str, Any]:
    engine = toy.build(world, clip=clip)
    rows = toy.train(engine, lambda step: toy.share(step, world), range(num_steps))
    return {
        "rows": rows,
        "fingerprint": engine.fingerprint(),
        "parameters": [tensor.flatten().tolist() for _, tensor in engine.full_tensors()],
    }


def strict_steps(world: World, folder: str, num_steps: int) -> dict[str, Any]:
    """Toy and llama with dropout under strict determinism: everything that must not depend on the number of ranks."""
    engine = toy.build(world, strict=True)
    rows = toy.train(engine, lambda step: toy.share(step, world), range(num_steps))
    with_zeros = toy.build(world, strict=True)
    toy.train(with_zeros, lambda step: toy.global_batch(step) if world.rank == 0 else [], range(num_steps))
    loose = toy.build(world)
    return {
        "rows": [[float(value).hex() for value in row] for row in rows],
        "loose": toy.train(loose, lambda step: toy.share(step, world), range(num_steps)),
        "bits": engine.replica()[1],
        "bits_on_rank_0": with_zeros.replica()[1],
        "llama": real_losses(world, folder, strict=True),
    }


def all_on_rank_0(world: World, num_steps: int) -> list[list[float]]:
    """Every other rank has an empty share."""
    engine = toy.build(world)
    return toy.train(engine, lambda step: toy.global_batch(step) if world.rank == 0 else [], range(num_steps))


def evaluation(world: World) -> dict[str, Any]:
    engine = toy.build(world)
    before = engine.fingerprint()
    unequal = toy.global_batch(0) if world.rank == 0 else toy.global_batch(1)[: world.rank]
    alone = toy.global_batch(0) + [batch for rank in range(1, world.world_size) for batch in toy.global_batch(1)[:rank]]
    together = engine.evaluate(unequal)
    nothing = engine.evaluate([])
    single = toy.build(World(type(world.place)(), world.device)).evaluate(alone)
    return {"together": together, "single": single, "nothing": nothing, "same": engine.fingerprint() == before}


def traffic(world: World, num_micro_batches: int) -> int:
    """Bytes given to collectives in a step with so many micro-batches on each rank."""
    engine = toy.build(world)
    batches = [toy.micro_batch(0, number, num_tokens=20, num_trained=5) for number in range(num_micro_batches)]
    return engine.step(batches, 0.01).bytes_sent


def nothing_trained(world: World) -> str:
    engine = toy.build(world)
    batch = toy.micro_batch(7, world.rank, num_tokens=5, num_trained=0)
    try:
        engine.step([batch], 0.01)
    except UserError as error:
        return str(error)
    return "no error"


def one_rank_is_not_finite(world: World) -> dict[str, Any]:
    """The last rank's loss overflows in the second step; the third is as if the second had not been."""
    return _broken_in_the_second_step(world, lambda model, loss: loss * float("inf"))


def one_rank_has_a_bad_gradient(world: World) -> dict[str, Any]:
    """The last rank's loss is finite in the second step, its gradient is not; the third is as if the second had not been."""
    # the root of 0 is 0, and its slope is infinite
    return _broken_in_the_second_step(world, lambda model, loss: loss + (model.module[0].weight.sum() * 0.0).sqrt())


def _broken_in_the_second_step(world: World, break_loss: Callable[[toy.Toy, torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    model = toy.Toy()
    broken = False

    def forward(batch: Any) -> tuple[torch.Tensor, int]:
        loss, weight = model.forward(batch)
        return (break_loss(model, loss) if broken else loss), weight

    engine = toy.NativeEngine(model, forward, world=world, optimizer=toy.adamw, settings=toy.StepSettings(gradient_clip=1.0))
    first = engine.step(toy.share(0, world), 0.01)
    parameters, everything = engine.fingerprint(), engine.replica()
    broken = world.rank == world.world_size - 1
    second = engine.step(toy.share(1, world), 0.01)
    broken = False
    unchanged = (engine.fingerprint(), engine.replica()) == (parameters, everything)
    third = engine.step(toy.share(2, world), 0.01)

    reference = toy.build(world)
    reference.step(toy.share(0, world), 0.01)
    expected = reference.step(toy.share(2, world), 0.01)
    is_same = engine.fingerprint() == reference.fingerprint() and engine.replica() == reference.replica()
    return {
        "applied": [first.applied, second.applied, third.applied],
        "loss": str(second.loss),
        "finite_loss": math.isfinite(second.loss),
        "unchanged": unchanged,
        "culprits": second.culprits,
        "as_if_it_had_not_been": third == expected and is_same,
    }


def flipped_bits(world: World) -> dict[str, Any]:
    """The last rank flips single bits of its training state, one at a time, and back."""
    engine = toy.build(world)
    engine.step(toy.share(0, world), 0.01)
    run = SimpleNamespace(world=world, engine=engine)
    before, after, said = engine.replica()[1], [], []
    assert replicas_differ(run) is None
    for number, (_, _, tensor) in enumerate(engine._state()):
        if not tensor.ndim:
            continue
        bits = tensor.detach().view(-1).view(torch.int32)
        place, bit = (number * 37) % bits.numel(), 1 << (number % 31)
        if world.rank == world.world_size - 1:
            bits[place] ^= bit
        after.append(engine.replica()[1])
        said.append(replicas_differ(run))
        if world.rank == world.world_size - 1:
            bits[place] ^= bit
    assert replicas_differ(run) is None
    return {"before": before, "after": after, "said": said}


def save_poison_load(world: World, precision: str = "fp32") -> dict[str, Any]:
    """Train, keep the shards of all ranks, spoil everything, load, go on; against an engine that was never disturbed."""
    # In fp16 the loss is so large that the scale must come down in the first steps: a fresh one is not the saved one.
    made = {"fp32": {}, "fp16": {"dtype": torch.float16, "gain": 30.0}}[precision]
    engine = toy.build(world, model=toy.Toy(**made), precision=precision)
    straight = toy.train(engine, lambda step: toy.share(step, world), range(4))
    saved = {(s.name, s.role): s.tensor.clone() for s in engine.shards()}
    mine = sorted(f"{name}/{role}" for name, role in saved)
    straight += toy.train(engine, lambda step: toy.share(step, world), range(4, 7))

    # The other ranks' shards travel as exact numbers: a checkpoint would carry them through files.
    plain = {
        f"{name}/{role}": [str(t.dtype), list(t.shape), t.double().flatten().tolist()] for (name, role), t in saved.items()
    }
    stored = {key: value for part in world.gather_json(plain) for key, value in part.items()}

    def read(name: str, role: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        dtype, whole, numbers = stored[f"{name}/{role}"]
        assert tuple(whole) == shape and not any(offset)
        return torch.tensor(numbers, dtype=torch.float64).reshape(shape).to(getattr(torch, dtype.removeprefix("torch.")))

    fresh = toy.build(world, model=toy.Toy(seed=99, **made), precision=precision)
    poison(fresh)
    fresh.load(read)
    resumed = toy.train(fresh, lambda step: toy.share(step, world), range(4, 7))
    return {
        "shards": mine,
        "all": sorted(stored),
        "straight": straight[4:],
        "resumed": resumed,
        "equal": engine.fingerprint() == fresh.fingerprint(),
    }


def poison(engine: toy.NativeEngine) -> None:
    """Whatever load leaves out is seen at once: it stays NaN."""
    with torch.no_grad():
        for _, _, tensor in engine._state():
            tensor.fill_(float("nan"))


def real_losses(world: World, folder: str, strict: bool = False) -> dict[str, Any]:
    """A llama with a fresh adapter and with dropout, over packed documents, five steps."""
    from fleetune.models.adapters import add_adapter
    from fleetune.models.build import load_model
    from fleetune.models.objective import TokenLoss

    model = load_model(folder, dtype="fp32", device="cpu", trainable=False, seed=3)
    add_adapter(model, adapter="lora", rank=4, alpha=8.0, dropout=0.1, targets=(), seed=3)
    settings = toy.StepSettings(gradient_clip=1.0, strict=strict)
    engine = toy.NativeEngine(model, forward_of(model, TokenLoss()), world=world, optimizer=toy.adamw, settings=settings)
    rows = toy.train(engine, lambda step: toy.share(step, world), range(5))
    return {"rows": rows, "fingerprint": engine.fingerprint()}
