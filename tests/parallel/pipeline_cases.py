"""What the ranks of a pipeline do in the tests: functions of (world, arguments) that give JSON."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleetune.checkpoint.store import CheckpointStore
from fleetune.models.causal import CausalModel
from fleetune.models.wanted import WantedAdapter, WantedModel
from fleetune.parallel.engines import Built, EngineRequest, PipeSettings, build_engine
from fleetune.parallel.native import StepSettings
from fleetune.parallel.pipe import StageForwards
from fleetune.parallel.world import Place, World
from fleetune.spec.batches import divide
from fleetune.spec.errors import UserError
from fleetune.spec.layout import Layout
from fleetune.spec.records import MicroBatch
from parallel import toy

#: Micro-batches of a step: lengths of the documents of each sequence, and how many tokens are trained. Means of means would
#: be far off, one micro-batch trains nothing, and none is as long as a micro-batch may be.
STEP = (
    ([[3, 9], [20]], 1),
    ([[16], [5, 5, 5]], 24),
    ([[7], [11]], 0),
    ([[2, 2, 2, 2], [23]], 19),
    ([[24]], 3),
    ([[4, 13], [6, 6, 6]], 30),
)
MICRO_BATCH_TOKENS = 48


def micro_batch(step: int, number: int) -> MicroBatch:
    sequences, num_trained = STEP[number]
    random = np.random.default_rng((step, number))
    lengths = [length for sequence in sequences for length in sequence]
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    possible = np.setdiff1d(np.arange(bounds[-1]), bounds[:-1])
    trained = np.zeros(bounds[-1], dtype=bool)
    trained[random.permutation(possible)[:num_trained]] = True
    return MicroBatch(
        step=step,
        number=number,
        sequences=tuple(step * 100 + 2 * number + index for index in range(len(sequences))),
        tokens=random.integers(3, 300, bounds[-1]).astype(np.int64),
        trained=trained,
        document_bounds=bounds,
        sequence_bounds=np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64),
        samples=tuple(f"rows:{step}.{number}.{index}" for index in range(len(lengths))),
    )


def share(step: int, world: World, num_micro_batches: int = len(STEP)) -> list[MicroBatch]:
    """The contiguous part of one data rank; its stages have the same one."""
    numbers = divide(num_micro_batches, 1, world.data_ranks).range_of(world.data_rank)
    return [micro_batch(step, number) for number in numbers]


def wanted(folder: str, method: str, **more: Any) -> WantedModel:
    adapter = None
    dropout = more.pop("dropout", 0.0)
    if method != "full":
        adapter = WantedAdapter(kind=method, rank=4, alpha=8.0, dropout=dropout, targets=more.pop("targets", ()))  # type: ignore[arg-type]
    return WantedModel(**{"folder": Path(folder), "precision": "fp32", "adapter": adapter, "seed": 3, **more})


def build(world: World, model: WantedModel, *, schedule: str = "1f1b", clip: float = 0.2) -> Built:
    """The native engine in a world of one, a pipeline in another."""
    name = "pipelined" if world.layout.pipeline > 1 else "replicated"
    settings = StepSettings(gradient_clip=clip, precision=model.precision)
    request = EngineRequest(world, model, toy.adamw, settings, pipe=PipeSettings(schedule, MICRO_BATCH_TOKENS))
    return build_engine(name, request)


def within(world: World, axes: dict[str, int]) -> World:
    """The same ranks in another layout."""
    return World(world.place, world.device, Layout(**axes))


def losses(
    world: World, folder: str, axes: dict[str, int], schedule: str, jobs: list[tuple[str, dict[str, Any]]], num_steps: int
) -> list[dict[str, Any]]:
    """What training shows, of each (method, more of the wanted model) in turn."""
    world = within(world, axes)
    return [_losses(world, build(world, wanted(folder, method, **more), schedule=schedule), num_steps) for method, more in jobs]


def _losses(world: World, built: Built, num_steps: int) -> dict[str, Any]:
    engine, model = built.engine, built.model
    frozen = _frozen(model)
    before = engine.evaluate(share(50, world))
    rows = toy.train(engine, lambda step: share(step, world), range(num_steps), 3e-3)
    after = engine.evaluate(share(51, world)[: 1 + world.data_rank])  # unequal, and other than in training
    full = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    held = engine.held()
    with (built.whole or partial(nullcontext, model))() as whole:
        replies = whole is not None
        same = whole is None or all(torch.equal(full[name], p.detach().cpu()) for name, p in whole.trained())
    return {
        "rows": rows,
        "before": before,
        "after": after,
        "fingerprint": engine.fingerprint(),
        "names": list(full),
        "whole": [replies, same],
        "copies_equal": all(torch.equal(full[name], p.detach().cpu()) for name, p in model.trained()),
        "here": [name for name, _ in model.trained()],
        "frozen_unchanged": frozen == _frozen(model),
        "held": [held.parameter_bytes, held.optimizer_bytes, held.trained_parameters, held.trained_here],
    }


def _frozen(model: CausalModel) -> dict[str, float]:
    named = model.module.named_parameters()
    return {name: p.double().sum().item() for name, p in named if not (p.is_meta or p.requires_grad)}


def resumed(
    world: World, folder: str, checkpoints: str, saves: tuple[dict[str, int], str], loads: tuple[dict[str, int], str]
) -> dict[str, Any]:
    """Four steps in one layout, saved after two; two more in another from the checkpoint, into an engine full of NaN."""
    model = wanted(folder, "lora", dropout=0.2, targets=("q_proj", "down_proj"))
    first = _in_part_of(world, saves[0])
    straight = []
    if first is not None:
        built = build(first, model, schedule=saves[1])
        straight = toy.train(built.engine, lambda step: share(step, first), range(2), 3e-3)
        store = _store(checkpoints, first)
        assert store.save(2, built.engine.shards(), {}).error is None
        straight = toy.train(built.engine, lambda step: share(step, first), range(2, 4), 3e-3)
        print_of = built.engine.fingerprint()
    world.barrier()
    second = _in_part_of(world, loads[0])
    if second is None:
        return {}
    built = build(second, model, schedule=loads[1])
    with torch.no_grad():
        for _, parameter in built.model.trained():
            parameter.fill_(float("nan"))
    checkpoint = _store(checkpoints, second).latest()
    assert checkpoint is not None
    built.engine.load(checkpoint.read)
    rows = toy.train(built.engine, lambda step: share(step, second), range(2, 4), 3e-3)
    told = {"straight": straight, "rows": rows, "fingerprint": built.engine.fingerprint()}
    return told if first is None else {**told, "straight_fingerprint": print_of}


def _in_part_of(world: World, axes: dict[str, int]) -> World | None:
    """The ranks in a layout; in that of one process rank 0 alone, in a world of its own."""
    if Layout(**axes).world_size == world.world_size:
        return within(world, axes)
    return World(Place(), world.device) if world.rank == 0 else None


def _store(folder: str, world: World) -> CheckpointStore:
    return CheckpointStore(Path(folder), rank=world.rank, world_size=world.world_size, barrier=world.barrier)


def not_finite(world: World, folder: str) -> dict[str, Any]:
    """The loss of the second step overflows in the last stage; the third is as if the second had not been."""
    world = within(world, {"pipeline": 2})
    model = wanted(folder, "lora")
    built = build(world, model)
    is_broken = [False]
    pipe = built.engine._pipe  # type: ignore[attr-defined]
    real = pipe._modules[-1]._forwards

    def loss(place: int, laid_out: Any, states: Any) -> tuple[torch.Tensor, int]:
        value, weight = real.loss(place, laid_out, states)
        return (value * float("inf") if is_broken[0] else value), weight

    pipe._modules[-1]._forwards = StageForwards(real.through, loss)
    first = built.engine.step(share(0, world), 1e-3)
    before = built.engine.fingerprint()
    is_broken[0] = True
    second = built.engine.step(share(1, world), 1e-3)
    is_broken[0] = False
    unchanged = built.engine.fingerprint() == before
    third = built.engine.step(share(2, world), 1e-3)
    reference = build(world, model)
    reference.engine.step(share(0, world), 1e-3)
    expected = reference.engine.step(share(2, world), 1e-3)
    return {
        "applied": [first.applied, second.applied, third.applied],
        "unchanged": unchanged,
        "as_if_it_had_not_been": (third.loss, third.gradient_norm) == (expected.loss, expected.gradient_norm),
    }


def half(world: World, folder: str, num_steps: int) -> list[list[float]]:
    """[applied, loss, norm, overflow] of steps in fp16; the first ones overflow until the scale has come down."""
    world = within(world, {"pipeline": world.world_size})
    built = build(world, wanted(folder, "full", precision="fp16"))
    built.engine._scale.value = 2.0**24  # type: ignore[attr-defined]
    reports = [built.engine.step(share(step, world), 1e-3) for step in range(num_steps)]
    norms = [report.gradient_norm if report.applied else 0.0 for report in reports]
    return [[float(report.applied), report.loss, norm, float(report.overflow)] for report, norm in zip(reports, norms)]


def refusals(world: World, folder: str) -> dict[str, str]:
    """What is told where nothing of a step is trained, and where a stage would train nothing."""
    world = within(world, {"pipeline": 2})
    told = {}
    built = build(world, wanted(folder, "lora"))
    for name, attempt in (
        ("nothing trained", lambda: built.engine.step([micro_batch(0, 2)], 1e-3)),
        ("idle stage", lambda: build(world, wanted(folder, "lora", targets=("0.self_attn.q_proj",)))),
    ):
        try:
            attempt()
        except UserError as error:
            told[name] = str(error)
    return told
