"""The sections of the spec that say what is done when something goes wrong, and against it."""

from __future__ import annotations

from typing import Literal

from fleetune.spec.section import Section as _Section
from fleetune.spec.section import declare as _field


class SurvivalSection(_Section):
    """What is done when something fails."""

    max_restarts: int = _field(
        3,
        "Start again so many times in a row without a new step or checkpoint; then give up (exit code 2). Restarts that get "
        "further do not count.",
        ge=0,
        resume=True,
    )
    hang_timeout: float = _field(
        10.0,
        "Seconds without a sign of life from a rank, or in one step (at least 6 times what the slow ones take), after which it "
        "is ended and the run goes on from its last checkpoint. 0: wait for ever.",
        ge=0.0,
        resume=True,
    )


class HealthSection(_Section):
    """What is done about numbers that go wrong, memory that runs out, and what a crash would lose."""

    on_nonfinite: Literal["stop", "skip", "rewind"] = _field(
        "skip",
        "A loss or gradient that is not finite, on any rank: end the run, leave this step's update out (20 in a row end the "
        "run), or go back to a checkpoint and leave the steps around it out. In fp16 a too large loss scale is no such case.",
        resume=True,
    )
    on_spike: Literal["ignore", "rewind"] = _field(
        "ignore",
        "A loss or gradient norm far above the recent ones: only tell, or go back to a checkpoint and leave the steps around "
        "it out.",
        resume=True,
    )
    skip_window: int = _field(
        4,
        "Steps that a rewind leaves out, up to the one where it was noticed; twice as many at each further try, of which "
        "there are 3.",
        ge=1,
        resume=True,
    )
    check_replicas_every: int = _field(
        100,
        "Compare what the ranks hold twice, bit by bit, every so many steps and before each checkpoint; 0 never does.",
        ge=0,
        resume=True,
    )
    determinism: Literal["repeat", "strict"] = _field(
        "repeat",
        "repeat: the same run on as many processes gives the same numbers. strict: on any number of data ranks, bit by bit; "
        "one thread per process, and gradients summed in one order, which costs time and memory.",
    )
    dynamic_batch_size: bool = _field(
        False,
        "Try the heaviest micro-batch before the first step, and larger ones where --micro-batch-size is not given. Where "
        "memory runs out, halve the micro-batch and double the accumulation (the same mathematics), then turn on gradient "
        "checkpointing, instead of ending the run.",
        resume=True,
    )
    save_mode: Literal["auto", "background", "blocking"] = _field(
        "auto",
        "background: training waits only for a copy in memory, which is written while it goes on. blocking: it waits for the "
        "disk. auto: in the background where the copy takes at most a twentieth of the free memory.",
        resume=True,
    )
