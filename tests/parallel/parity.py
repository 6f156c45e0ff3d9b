"""One training run of a real tiny model on any engine, whose losses and norms can be held against one process's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fleetune.models.wanted import WantedAdapter, WantedModel
from fleetune.parallel.engines import EngineRequest, PipeSettings, build_engine
from fleetune.parallel.native import StepSettings
from fleetune.parallel.world import World
from fleetune.parallel.zero_settings import ZeroSettings
from fleetune.planning.engines import choose_engine
from fleetune.spec.batches import divide
from fleetune.spec.layout import Layout
from fleetune.spec.records import MicroBatch
from fleetune.spec.run_spec import RunSpec

#: (tokens of each document, trained tokens) of the micro-batches of a step: as unequal as can be, one with nothing trained.
#: A mean of means, or of ranks, would be far off.
SIZES = (((6,), 1), ((30, 12, 9), 40), ((9,), 0), ((20,), 3), ((25, 14), 33))
LONGEST = max(sum(lengths) for lengths, _ in SIZES)
VOCABULARY = 300


def global_batch(step: int) -> list[MicroBatch]:
    return [_micro_batch(step, number, lengths, trained) for number, (lengths, trained) in enumerate(SIZES)]


def _micro_batch(step: int, number: int, lengths: Sequence[int], num_trained: int) -> MicroBatch:
    random = np.random.default_rng((step, number))
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    possible = np.setdiff1d(np.arange(bounds[-1]), bounds[:-1])
    trained = np.zeros(bounds[-1], dtype=bool)
    trained[random.permutation(possible)[:num_trained]] = True
    return MicroBatch(
        step=step,
        number=number,
        sequences=(step * 100 + number,),
        tokens=random.integers(3, VOCABULARY, bounds[-1]).astype(np.int64),
        trained=trained,
        document_bounds=bounds.astype(np.int64),
        sequence_bounds=np.array([0, len(lengths)]),
        samples=tuple(f"rows:{step * 100 + number}.{document}" for document in range(len(lengths))),
    )


def share(step: int, world: World) -> list[MicroBatch]:
    batches = global_batch(step)
    return [batches[number] for number in divide(len(batches), 1, world.data_ranks).range_of(world.data_rank)]


def adamw(named: Any) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, fused=True)


def wanted(folder: str, method: str, **more: Any) -> WantedModel:
    """method: full, lora, dora or rslora; or the folder of an adapter to go on with."""
    if "/" in method:
        return WantedModel(Path(folder), more.pop("precision", "fp32"), adapter_folder=Path(method), seed=3, **more)
    dropout = more.pop("dropout", 0.0)
    targets = tuple(more.pop("targets", ()))
    adapter = None if method == "full" else WantedAdapter(method, 4, 8.0, dropout, targets)  # type: ignore[arg-type]
    return WantedModel(Path(folder), more.pop("precision", "fp32"), adapter=adapter, seed=3, **more)


def engine_of(world: World, folder: str, method: str, *, accumulate: str = "shards", clip: float = 0.5, **more: Any) -> Any:
    """more: of the wanted model; `zero` is a stage of DeepSpeed's, `schedule` that of a pipeline."""
    precision = more.get("precision", "fp32")
    stage, schedule = more.pop("zero", None), more.pop("schedule", "1f1b")
    request = EngineRequest(
        world,
        wanted(folder, method, **more),
        adamw,
        StepSettings(clip, precision, accumulate),
        zero=None if stage is None else ZeroSettings(stage),
        pipe=PipeSettings(schedule, LONGEST),
    )
    return build_engine("deepspeed" if stage is not None else choose_engine(RunSpec(), world.layout), request)


def inside(world: World, layout: dict[str, int]) -> World:
    """The same ranks in a layout."""
    return World(world.place, world.device, Layout(**layout))


def train(engine: Any, world: World, steps: range, learning_rate: float = 0.01) -> list[list[float]]:
    reports = [engine.step(share(step, world), learning_rate) for step in steps]
    return [[report.loss, report.gradient_norm, report.trained_tokens, report.tokens] for report in reports]


def run(world: World, layout: dict[str, int], folder: str, method: str, num_steps: int, more: dict[str, Any]) -> dict[str, Any]:
    """Train, and say everything that another layout must say too."""
    spread = inside(world, layout)
    built = engine_of(spread, folder, method, **more)
    first = {name: value.double().sum().item() for name, value in built.engine.full_tensors()}
    rows = train(built.engine, spread, range(num_steps))
    sent = spread.bytes_sent
    evaluated = built.engine.evaluate(share(100, spread))
    held = built.engine.held()
    return {
        "rows": rows,
        "first": first,
        "evaluated": list(evaluated),
        "fingerprint": built.engine.fingerprint(),
        "last": {name: value.double().sum().item() for name, value in built.engine.full_tensors()},
        "held": [held.parameter_bytes, held.optimizer_bytes, held.trained_parameters, held.trained_here],
        "sent": sent,
    }


def passed_on(
    world: World, layouts: list[dict[str, int]], folder: str, method: str, saved_in: str, more: dict[str, Any]
) -> dict[str, Any]:
    """Train three steps in the first layout, save, spoil everything, load in each of the others and in the first, go on."""
    first = inside(world, layouts[0])
    built = engine_of(first, folder, method, **more)
    train(built.engine, first, range(3))
    store = store_of(first, saved_in)
    saved = store.save(3, built.engine.shards(), {"step": 3}, best=False)
    assert saved.error is None, saved.error
    straight = train(built.engine, first, range(3, 5))
    answer: dict[str, Any] = {"straight": straight, "fingerprint": built.engine.fingerprint(), "resumed": {}}
    for layout in layouts:
        other = inside(world, layout)
        fresh = engine_of(other, folder, method, **more).engine
        spoil(fresh)
        found = store_of(other, saved_in).latest()
        assert found is not None
        fresh.load(found.read)
        rows = train(fresh, other, range(3, 5))
        answer["resumed"][Layout(**layout).describe()] = [rows, fresh.fingerprint()]
    return answer


def store_of(world: World, folder: str) -> Any:
    from fleetune.checkpoint.store import CheckpointStore

    return CheckpointStore(
        Path(folder), rank=world.rank, world_size=world.world_size, barrier=world.barrier, keep=2, fingerprints={}
    )


def spoil(engine: Any) -> None:
    """Whatever load leaves out is seen at once: it stays NaN."""
    with torch.no_grad():
        for shard in engine.shards():
            shard.tensor.fill_(float("nan"))


def not_finite(world: World, layout: dict[str, int], folder: str) -> dict[str, Any]:
    """The last rank's loss overflows in the second step; the third is as if the second had not been."""
    spread = inside(world, layout)
    engine = engine_of(spread, folder, "lora").engine
    reference = engine_of(spread, folder, "lora").engine
    forward, broken = engine._forward, False

    def breaking(batch: MicroBatch) -> tuple[torch.Tensor, int]:
        loss, weight = forward(batch)
        return (loss * float("inf") if broken else loss), weight

    engine._forward = breaking
    first = engine.step(share(0, spread), 0.01)
    before = engine.fingerprint()
    broken = world.rank == world.world_size - 1
    second = engine.step(share(1, spread), 0.01)
    broken = False
    unchanged = engine.fingerprint() == before
    third = engine.step(share(2, spread), 0.01)
    reference.step(share(0, spread), 0.01)
    expected = reference.step(share(2, spread), 0.01)
    return {
        "applied": [first.applied, second.applied, third.applied],
        "unchanged": unchanged,
        "as_if_it_had_not_been": third.loss == expected.loss and engine.fingerprint() == reference.fingerprint(),
    }


def refused(world: World, layout: dict[str, int], folder: str) -> str:
    from fleetune.spec.errors import UserError

    try:
        engine_of(inside(world, layout), folder, "lora")
    except UserError as error:
        return str(error)
    return "no error"


class Peak:
    """Highest anonymous and shared memory of this process above that at the start, sampled; mapped files do not count."""

    def __init__(self) -> None:
        self._before = self._highest = _held_bytes()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def taken(self) -> int:
        """Since the last call, or the start."""
        self._highest = max(self._highest, _held_bytes())
        taken, self._highest = self._highest - self._before, 0
        return taken

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.002):
            self._highest = max(self._highest, _held_bytes())


def _held_bytes() -> int:
    """Anonymous memory plus shared, from the kernel's own account."""
    text = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(("RssAnon:", "RssShmem:")))


def memory(world: World, layout: dict[str, int], folder: str, method: str, tiny: str) -> dict[str, int]:
    """Bytes that this rank takes while it loads, and while it trains two steps; after a tiny model has had everything imported
    and all groups made, since those are no part of a model."""
    spread = inside(world, layout)
    first = engine_of(spread, tiny, method).engine
    train(first, spread, range(1))
    first.close()
    spread.barrier()
    peak = Peak()
    built = engine_of(spread, folder, method)
    loading = peak.taken()
    train(built.engine, spread, range(2))
    training = peak.taken()
    peak.stop()
    held = built.engine.held()
    return {
        "loading": loading,
        "training": training,
        "parameter_bytes": held.parameter_bytes,
        "optimizer_bytes": held.optimizer_bytes,
    }
