"""Starts the workers of one attempt on one machine, through torch elastic's agent, which never restarts anything here.

What the workers import was imported before `main` is called (see `fleetune.launch.child`); they are forked from this
process, so they start at once and share that memory.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from fleetune.launch import lifeline, pulse
from fleetune.launch.liveness import AGENT
from fleetune.launch.processes import open_log
from fleetune.parallel.world import STORE_VARIABLE, connect
from fleetune.spec.run_folder import RunFolder

_MONITOR_S = 0.1
#: A report that finds the pipe full is tried again for ten seconds.
_REPORT_TRIES = 100


def main(arguments: list[str]) -> int:
    """Run the workers to their end; 0 where all ended well. Who failed is told on the report pipe."""
    parser = argparse.ArgumentParser(prog="fleetune.parallel.agent")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--store", required=True)
    options = parser.parse_args(arguments)
    os.environ[STORE_VARIABLE] = options.store
    pipe = Connection(int(os.environ[pulse.VARIABLE]), readable=False)
    life = Connection(int(os.environ[lifeline.VARIABLE]), writable=False)
    spec = WorkerSpec(
        role="worker",
        local_world_size=options.num_processes,
        entrypoint=run_worker,
        args=(Task(options.worker, RunFolder(options.folder), options.attempt, pipe, life),),
        rdzv_handler=FixedRendezvous(options.store, options.attempt, options.node, options.num_nodes),
        max_restarts=0,
        monitor_interval=_MONITOR_S,
    )
    quiet()
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, every page the workers share
    agent = LivingAgent(spec, logs_specs=NoLogs(), start_method=start_method())
    agent.pipe = pipe
    try:
        result = agent.run()
    except SignalException:
        return 1
    report(pipe, {"ended": exit_codes(agent, result)})
    return 1 if result.is_failed() else 0


def quiet() -> None:
    """Keep torch's agent from logging. Its first line would import torch._dynamo to be formatted, which takes seconds, just
    when a worker has died; who died and how is reported here anyway."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def start_method() -> str:
    """Forking is fast, and impossible once CUDA has been started in this process (an import may have done it)."""
    if torch.cuda.is_initialized() or sys.platform == "darwin":
        print("the workers are started afresh, which takes longer: this process cannot be forked", file=sys.stderr)
        return "spawn"
    return "fork"


@dataclass(frozen=True)
class Task:
    """What a worker is to do. One object, and no strings of a person's in the arguments: torch substitutes `$` in those.

    report, lifeline: pipe ends; as connections they find their way into a process that is started afresh, too.
    """

    module: str
    folder: RunFolder
    attempt: int
    report: Connection
    lifeline: Connection


def run_worker(task: Task) -> int:
    """In the worker's own process: say who we are, write into our own log, and run the module."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the agent's handlers are inherited by a fork
    os.environ[lifeline.VARIABLE] = str(task.lifeline.fileno())
    os.environ[pulse.VARIABLE] = str(task.report.fileno())  # the worker gives its signs of life there
    lifeline.watch()
    rank = int(os.environ["RANK"])
    report(task.report, {"started": rank, "pid": os.getpid()})
    log = open_log(task.folder.log(rank, task.attempt))
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    code = int(importlib.import_module(task.module).main([str(task.folder.path), "--attempt", str(task.attempt)]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        os._exit(code)  # no shutdown of the interpreter, in which a foreign thread could hang
    return code


def report(pipe: Connection, row: dict[str, Any]) -> None:
    """One line for the supervisor. Short enough to be written whole, also when several processes write."""
    for _ in range(_REPORT_TRIES):
        try:
            os.write(pipe.fileno(), json.dumps(row).encode() + b"\n")
            return
        except BlockingIOError:  # the supervisor is stopped, and the pipe full of signs of life
            time.sleep(_MONITOR_S)


@final
class LivingAgent(LocalElasticAgent):
    """torch's agent, which tells the supervisor that it is alive each time that it looks at its workers."""

    pipe: Connection
    _told_at = 0.0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        now = time.monotonic()
        if now - self._told_at >= pulse.INTERVAL_S:
            self._told_at = now
            with suppress(BlockingIOError):
                os.write(self.pipe.fileno(), json.dumps({"pulse": AGENT, "phase": "watch"}).encode() + b"\n")
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            # At once: ending the others comes next, and takes longer than a supervisor may wait for the cause.
            report(self.pipe, {"ended": {rank: failure.exitcode for rank, failure in result.failures.items()}})
        return result


def exit_codes(agent: LocalElasticAgent, result: RunResult) -> dict[int, int]:
    """Exit code by rank. torch gives only that of the first failure; the others help to tell cause from consequence."""
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    context = getattr(getattr(agent, "_pcontext", None), "_pc", None)
    workers = agent.get_worker_group().workers
    for worker, process in zip(workers, getattr(context, "processes", [])):
        if process.exitcode is not None:
            codes[worker.global_rank] = process.exitcode
    return codes


@final
class FixedRendezvous(RendezvousHandler):
    """Who takes part is decided by the supervisor, so there is nothing to negotiate: only the store to hand over."""

    def __init__(self, endpoint: str, attempt: int, node: int, num_nodes: int) -> None:
        self._endpoint, self._attempt = endpoint, attempt
        self._node, self._num_nodes = node, num_nodes

    def get_backend(self) -> str:
        return "fixed"

    def next_rendezvous(self) -> RendezvousInfo:
        host, _, port = self._endpoint.rpartition(":")
        store = PrefixStore(f"attempt-{self._attempt}/agents", connect(self._endpoint, timedelta(seconds=60)))
        return RendezvousInfo(store, self._node, self._num_nodes, RendezvousStoreInfo(host, int(port)))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return f"attempt-{self._attempt}"

    def shutdown(self) -> bool:
        return True


@final
class NoLogs(LogsSpecs):
    """Each worker opens its own log in the run folder; torch writes none."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nothing = dict.fromkeys(envs, "")
        return LogsDest(nothing, nothing, {}, {}, nothing, "", "")

    @property
    def root_log_dir(self) -> str:
        return ""
