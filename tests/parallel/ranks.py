"""Real ranks for tests: processes forked from a clean one that has imported torch once, joined through our own store."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetune.launch.lifeline import Lifeline
from fleetune.launch.processes import Surroundings
from fleetune.launch.request import Commands
from fleetune.launch.team import Store
from fleetune.spec.run_folder import RunFolder

_context = multiprocessing.get_context("forkserver")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for its device when it is imported
_context.set_forkserver_preload(
    ["torch._dynamo", "transformers.models.llama.modeling_llama", "deepspeed", "parallel.cases", "parallel.pipeline_cases"]
)
_attempts = itertools.count(1000)


class Ranks:
    """Runs functions on 1 to 3 ranks. Each has its own attempt number, so nothing of an earlier test is seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lifeline = Lifeline()
        run = RunFolder(folder / "store")
        run.create()
        self._store = Store(Commands(), run, Surroundings(dict(os.environ), self._lifeline))
        deadline = time.monotonic() + 300
        while self._store.endpoint is None:
            assert self._store.process.exit_code is None, (run.logs / "store.log").read_text()
            assert time.monotonic() < deadline, "the store did not start"
            time.sleep(0.02)

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *arguments: Any,
        dying: int | None = None,
        patience_s: float = 300.0,
    ) -> list[Any]:
        """`function(world, *arguments)` on every rank; the results (JSON) in the order of ranks. Fails with a rank's error.

        dying: a rank that must be killed on its way; its result is None. patience_s: then it hangs.
        """
        attempt = next(_attempts)
        folder = self._folder / f"call-{attempt}"
        folder.mkdir()
        processes = [
            _context.Process(
                target=_one_rank, args=(function, rank, world_size, attempt, self._store.endpoint, folder, arguments)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + patience_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        assert not hanging, f"ranks {hanging} hang:\n" + "\n".join(errors)
        assert not errors, "\n".join(errors)
        assert dying is None or processes[dying].exitcode == -signal.SIGKILL
        texts = [None if rank == dying else (folder / f"{rank}.json").read_text() for rank in range(world_size)]
        return [None if text is None else json.loads(text) for text in texts]

    @property
    def store_pid(self) -> int:
        return self._store.process.pid

    def close(self) -> None:
        self._store.close()
        self._lifeline.close()


def _one_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    attempt: int,
    endpoint: str,
    folder: Path,
    arguments: tuple[Any, ...],
) -> None:
    try:
        import torch

        from fleetune.parallel.world import World

        torch.set_num_threads(1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        os.environ.update({name: str(value) for name, value in place.items()}, FLEETUNE_STORE=endpoint)
        world = World.join(attempt=attempt, timeout_s=240)
        result = function(world, *arguments)
        (folder / f"{rank}.json").write_text(json.dumps(result))
        world.leave()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)
