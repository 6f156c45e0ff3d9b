"""What the ranks of a DeepSpeed test do: functions of (world, arguments) that give JSON. Each runs several stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fleetune.parallel.native import Forward, NativeEngine, forward_of
from fleetune.parallel.world import World
from fleetune.parallel.zero import ZeroEngine
from fleetune.parallel.zero_settings import ZeroSettings
from fleetune.spec.records import MicroBatch, Shard
from parallel import toy

#: precision -> how the toy is made in it. In fp16 the loss is so large that its scale must come down in the first steps.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16, "gain": 30.0},
}


def build(
    world: World, stage: int | None, *, clip: float = 1.0, precision: str = "fp32", seed: int = 0, **more: Any
) -> NativeEngine | ZeroEngine:
    """stage None: the native engine."""
    model = toy.Toy(seed=seed, device=str(world.device), **PRECISIONS[precision])
    settings = toy.StepSettings(gradient_clip=clip, precision=precision, accumulate=more.pop("accumulate", "shards"))
    return over(world, stage, model, model.forward, settings, **more)


def over(
    world: World, stage: int | None, model: Any, forward: Forward, settings: toy.StepSettings, **zero: Any
) -> NativeEngine | ZeroEngine:
    if stage is None:
        return NativeEngine(model, forward, world=world, optimizer=toy.adamw, settings=settings)
    chosen = ZeroSettings(stage, **zero)
    return ZeroEngine(model, forward, world=world, optimizer=toy.adamw, settings=settings, zero=chosen)


def train(engine: Any, world: World, steps: Iterable[int]) -> list[list[float]]:
    return toy.train(engine, lambda step: toy.share(step, world), steps)


def stages(world: World, which: Sequence[int | None], num_steps: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Losses and weights of the toy by stage; the batches have unequal and zero trained tokens."""
    found = []
    for stage in which:
        engine = build(world, stage, **options)
        rows = train(engine, world, range(num_steps))
        tensors = [tensor.flatten().tolist() for _, tensor in engine.full_tensors()]
        found.append({"rows": rows, "fingerprint": engine.fingerprint(), "parameters": tensors})
        engine.close()
    return found


def empty_shares(world: World, which: Sequence[int]) -> list[list[list[float]]]:
    """Rank 0 has everything."""
    found = []
    for stage in which:
        engine = build(world, stage)
        found.append(toy.train(engine, lambda step: toy.global_batch(step) if world.rank == 0 else [], range(4)))
    return found


def evaluations(world: World, which: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for stage in which:
        engine = build(world, stage)
        before = engine.fingerprint()
        unequal = toy.global_batch(0) if world.rank == 0 else toy.global_batch(1)[:1]
        together, nothing = engine.evaluate(unequal), engine.evaluate([])
        found.append({"together": together, "nothing": nothing, "same": engine.fingerprint() == before})
    return found


def not_finite(world: World, which: Sequence[int]) -> list[dict[str, Any]]:
    """The last rank's loss overflows in the second step; the third is as if the second had not been."""
    found = []
    for stage in which:
        model, broken = toy.Toy(), [False]

        def forward(batch: MicroBatch, model: toy.Toy = model, broken: list[bool] = broken) -> tuple[torch.Tensor, int]:
            loss, weight = model.forward(batch)
            return (loss * float("inf") if broken[0] else loss), weight

        engine = over(world, stage, model, forward, toy.StepSettings(gradient_clip=1.0))
        reports = [engine.step(toy.share(0, world), 0.01)]
        before = engine.fingerprint()
        broken[0] = world.rank == world.world_size - 1
        reports.append(engine.step(toy.share(1, world), 0.01))
        broken[0] = False
        unchanged = engine.fingerprint() == before
        reports.append(engine.step(toy.share(2, world), 0.01))
        reference = build(world, stage)
        reference.step(toy.share(0, world), 0.01)
        expected = reference.step(toy.share(2, world), 0.01)
        found.append(
            {
                "applied": [report.applied for report in reports],
                "loss": str(reports[1].loss),
                "unchanged": unchanged,
                "as_if": [reports[2].loss, reports[2].gradient_norm] == [expected.loss, expected.gradient_norm]
                and engine.fingerprint() == reference.fingerprint(),
            }
        )
    return found


def traffic(world: World, which: Sequence[int], counts: Sequence[int], accumulate: str = "shards") -> list[list[int]]:
    """Bytes given to collectives, by stage and number of micro-batches on each rank."""
    found = []
    for stage in which:
        engine = build(world, stage, accumulate=accumulate)
        engine.step([toy.micro_batch(0, 0, num_tokens=20, num_trained=5)], 0.01)  # ZeRO-3 gathers otherwise in its first pass
        found.append([])
        for count in counts:
            batches = [toy.micro_batch(0, number, num_tokens=20, num_trained=5) for number in range(count)]
            found[-1].append(engine.step(batches, 0.01).bytes_sent)
    return found


def saves_and_loads(
    world: World, pairs: Sequence[tuple[int | None, int | None]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    return [save_and_load(world, first, second, options) for first, second in pairs]


def save_and_load(world: World, first: int | None, second: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train under one stage, keep the pieces of all ranks, load them into a poisoned engine of another, go on with both."""
    engine = build(world, first, **options)
    train(engine, world, range(4))
    mine = [plain(shard) for shard in engine.shards()]
    straight = train(engine, world, range(4, 7))
    everything = [piece for part in world.gather_json(mine) for piece in part]
    fresh = build(world, second, seed=99, **options)
    poison(fresh)
    fresh.load(reader(everything))
    again = [plain(shard) for shard in fresh.shards()]
    resumed = train(fresh, world, range(4, 7))
    return {
        "pieces": [[piece["name"], piece["role"], piece["shape"], piece["offset"], piece["part"]] for piece in mine],
        "straight": straight,
        "resumed": resumed,
        "equal": engine.fingerprint() == fresh.fingerprint(),
        "saved_again": sum_of(world.gather_json(again)) == sum_of([everything]),
    }


def plain(shard: Shard) -> dict[str, Any]:
    tensor = shard.tensor.detach().cpu()
    return {
        "name": shard.name,
        "role": shard.role,
        "shape": list(shard.global_shape),
        "offset": list(shard.offset),
        "part": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "values": tensor.double().flatten().tolist(),
    }


def assembled(pieces: Iterable[dict[str, Any]]) -> dict[tuple[str, str], torch.Tensor]:
    """Whole tensors of pieces that cover each element exactly once."""
    whole: dict[tuple[str, str], torch.Tensor] = {}
    covered: dict[tuple[str, str], torch.Tensor] = {}
    for piece in pieces:
        key = (piece["name"], piece["role"])
        dtype = getattr(torch, piece["dtype"].removeprefix("torch."))
        box = tuple(slice(start, start + size) for start, size in zip(piece["offset"], piece["part"]))
        into = whole.setdefault(key, torch.zeros(piece["shape"], dtype=dtype))
        into[box] = torch.tensor(piece["values"], dtype=torch.float64).reshape(piece["part"]).to(dtype)
        covered.setdefault(key, torch.zeros(piece["shape"], dtype=torch.int32))[box] += 1
    assert all(bool((count == 1).all()) for count in covered.values()), "an element is written twice, or by nobody"
    return whole


def sum_of(parts: list[list[dict[str, Any]]]) -> list[tuple[str, str, list[float]]]:
    whole = assembled(piece for part in parts for piece in part)
    return sorted((name, role, tensor.double().flatten().tolist()) for (name, role), tensor in whole.items())


def reader(pieces: list[dict[str, Any]]) -> Callable[..., torch.Tensor]:
    whole = assembled(pieces)

    def read(name: str, role: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return whole[name, role][tuple(slice(start, start + size) for start, size in zip(offset, shape))].clone()

    return read


def poison(engine: NativeEngine | ZeroEngine) -> None:
    """Whatever load leaves out is seen at once: it stays NaN."""
    with torch.no_grad():
        if isinstance(engine, NativeEngine):
            for _, _, tensor in engine._state():
                tensor.fill_(float("nan"))
            return
        for flat in engine._holding.flats():
            flat.fill_(float("nan"))
            for moment in ("exp_avg", "exp_avg_sq"):
                engine._optimizer.state[flat][moment].fill_(float("nan"))
        for _, parameter in engine._named:
            getattr(parameter, "ds_tensor", parameter).data.fill_(float("nan"))
            parameter.data.fill_(float("nan"))


def real(world: World, folder: str, which: Sequence[int | None], options: dict[str, Any]) -> list[dict[str, Any]]:
    """A llama over packed documents with dropout, five steps, all of it trained or an adapter; and its frozen weights."""
    from fleetune.models.adapters import add_adapter
    from fleetune.models.build import load_model
    from fleetune.models.objective import TokenLoss

    adapter, precision, num_steps = options.get("adapter"), options.get("precision", "fp32"), options.get("num_steps", 5)
    found = []
    for stage in which:
        model = load_model(
            folder,
            dtype=precision,
            device="cpu",
            trainable=adapter is None,
            gradient_checkpointing=options.get("gradient_checkpointing", False),
            seed=3,
        )
        if adapter is not None:
            add_adapter(model, adapter=adapter, rank=4, alpha=8.0, dropout=0.1, targets=(), seed=3)
        frozen = {name: parameter for name, parameter in model.module.named_parameters() if not parameter.requires_grad}
        before = digests(frozen)
        settings = toy.StepSettings(gradient_clip=1.0, precision=precision)
        engine = over(world, stage, model, forward_of(model, TokenLoss()), settings, **options.get("zero", {}))
        held_out = engine.evaluate(toy.share(9, world))
        rows = train(engine, world, range(num_steps))
        found.append(
            {
                "rows": rows,
                "held_out": [held_out[0] / held_out[1], engine.evaluate(toy.share(9, world))[0] / held_out[1]],
                "fingerprint": engine.fingerprint(),
                "frozen": len(frozen),
                "unchanged": digests(frozen) == before,
            }
        )
        engine.close()
    return found


def digests(parameters: dict[str, torch.nn.Parameter]) -> dict[str, str]:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    found = {}
    for name, parameter in parameters.items():
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = hashlib.sha256(parameter.detach().view(torch.uint8).numpy().tobytes()).hexdigest()
    return found
