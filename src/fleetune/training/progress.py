"""One run on one rank: its parts, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fleetune.checkpoint.store import CheckpointStore
from fleetune.launch.pulse import Pulse
from fleetune.monitor.monitor import Monitor
from fleetune.parallel.engine import Engine
from fleetune.parallel.world import World

if TYPE_CHECKING:
    from fleetune.training.room import Room
    from fleetune.training.saving import Saves
    from fleetune.training.spread import SpreadCheckpoints


class Evaluation(Protocol):
    """Held-out loss over all ranks; None where there are no held-out rows. Raises StopAsked between its batches."""

    def __call__(self) -> tuple[float, int] | None: ...


@dataclass
class Progress:
    """What the loop knows beside the engine's tensors; saved in every checkpoint, by name.

    skipped_in_a_row: steps without an update up to now. recent_losses, recent_log_norms: what spikes are measured by.
    num_saves, save_stall_s: checkpoints written, and the seconds that training waited for them.
    rewinds: steps (from 1) at which the run went back. left_out: [first step, last step, why] that are not trained.
    """

    step: int = 0
    next_sequence: int = 0
    num_steps: int = 0
    schedule_steps: int = 0
    global_batch_size: int = 0
    micro_batch_size: int = 0
    trained_tokens: int = 0
    tokens: int = 0
    training_s: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None
    evaluations_without_better: int = 0
    last_evaluated: int | None = None
    before: dict[str, Any] | None = None
    skipped_in_a_row: int = 0
    recent_losses: list[float] = field(default_factory=list)
    recent_log_norms: list[float] = field(default_factory=list)
    rewinds: list[int] = field(default_factory=list)
    left_out: list[tuple[int, int, str]] = field(default_factory=list)
    num_saves: int = 0
    save_stall_s: float = 0.0

    def why_left_out(self, step: int) -> str | None:
        """Why a step (from 1) is not trained; None where it is."""
        return next((why for first, last, why in self.left_out if first <= step <= last), None)


@dataclass(frozen=True)
class Cadence:
    """When the loop saves, evaluates, compares replicas and gives up; in steps and evaluations, 0 is never.

    checkpoint_every: None leaves it to what saving costs.
    """

    checkpoint_every: int | None
    evaluate_every: int
    early_stop: int
    check_replicas_every: int = 0


@dataclass(frozen=True)
class Policy:
    """What is done about numbers that go wrong; the words are those of the spec's fields of the same names."""

    on_nonfinite: str = "skip"
    on_spike: str = "ignore"
    skip_window: int = 4

    @property
    def may_rewind(self) -> bool:
        return "rewind" in (self.on_nonfinite, self.on_spike)


@dataclass
class Run:
    """The parts of one run on one rank. `peak_memory` in bytes, of this rank. `resize` sets the micro-batch size of the steps
    that are read from now on."""

    world: World
    engine: Engine
    monitor: Monitor | None
    checkpoints: CheckpointStore | SpreadCheckpoints
    saves: Saves
    schedule: Callable[[int], float]
    cadence: Cadence
    policy: Policy
    evaluate: Evaluation
    stop_requested: Callable[[], bool]
    peak_memory: Callable[[], int]
    resize: Callable[[int], None]
    room: Room
    progress: Progress = field(default_factory=Progress)
    pulse: Pulse = field(default_factory=Pulse)
    replica_faults: int = 0


def event(run: Run, kind: str, **fields: Any) -> None:
    """Write down what happened; rank 0 does."""
    if run.monitor is not None:
        run.monitor.event(kind, **fields)
