"""What is to be started, with how much patience, and in which surroundings: plain values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetune.launch.devices import thread_variables, usable_cores

#: Variables of an outer launcher that would contradict what our own processes are told.
_FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Commands:
    """Names of the modules that are started; each has `main(arguments) -> exit code`.

    prepare RUN_FOLDER: once, before everything. worker RUN_FOLDER --attempt N: one rank of one attempt.
    agent, store: for several processes. preload: what workers will import, done once, while `prepare` runs; it must start no
    thread that holds locks and touch no GPU, because all workers are forked from the process that imported it.
    """

    prepare: str = "fleetune.training.prepare"
    worker: str = "fleetune.training.worker"
    agent: str = "fleetune.parallel.agent"
    store: str = "fleetune.parallel.store"
    # Making the first optimizer imports torch._dynamo; that, torch and transformers each take 1.4 s of a processor.
    preload: tuple[str, ...] = (
        "torch",
        "torch._dynamo",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "fleetune.spec.read",
        "fleetune.training.build",
        "fleetune.training.loop",
        "fleetune.models.build",
        "fleetune.parallel.native",
    )


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds, and how often to try.

    restarts: so many in a row without a new checkpoint or step; then the run is given up. backoff_s: before the first of
    them, doubled for each further one, at most backoff_limit_s; after an attempt with progress nobody waits. hang_s: a rank
    without a sign of life, or in a step for so long, hangs (see `liveness`); 0 never. peers_s: what the other ranks get to
    end by themselves after one has crashed. cleanup_s: what a rank gets after its outcome is written. save_s: what all get
    to save when asked to stop.
    """

    restarts: int = 3
    backoff_s: float = 1.0
    backoff_limit_s: float = 30.0
    peers_s: float = 3.0
    cleanup_s: float = 20.0
    save_s: float = 600.0
    hang_s: float = 10.0
    poll_s: float = 0.1

    def backoff(self, fruitless: int) -> float:
        """Seconds to wait before a restart that follows `fruitless` attempts in a row without progress."""
        return min(self.backoff_limit_s, self.backoff_s * 2.0 ** (fruitless - 1)) if fruitless else 0.0


@dataclass(frozen=True)
class Launch:
    """What to start. threads: per process, None: the cores, shared out. environment: beside this process's own.

    node, num_nodes: which machine of how many this is; then num_processes are those of this machine, their ranks begin at
    first_rank, and the driver has the store. min_processes: what the run may shrink to where devices fail; None: it may not.
    device: `cpu` or `cuda`. prepare_arguments: given to `prepare` after the run folder. replan: called before the run goes
    on with another number of processes; it raises
    UserError where that cannot be.
    """

    num_processes: int = 1
    node: int = 0
    num_nodes: int = 1
    first_rank: int = 0
    min_processes: int | None = None
    device: str = "cpu"
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare_arguments: tuple[str, ...] = ()
    replan: Callable[[int], None] = lambda num_processes: None
    commands: Commands = field(default_factory=Commands)
    patience: Patience = field(default_factory=Patience)


def environment_of(launch: Launch) -> tuple[dict[str, str], str | None]:
    """(environment of every process of the run, a warning about its threads or None)."""
    own = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment = {**own, **launch.environment}
    threads, warning = thread_variables(launch.num_processes, launch.threads, environment, usable_cores())
    fixed = {
        # Without it, torch 2.13 lets the workers of a restarted agent read addresses of the attempt before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Asking for GPUs must not start CUDA in a process that is going to fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**environment, **threads, **fixed}, warning


def device_variables(devices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Makes only these GPUs visible to the workers, by their number among those that are visible now."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [part.strip() for part in visible.split(",")] if visible else []
    chosen = [names[device] if device < len(names) else str(device) for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
