"""A worker that does as the run folder's `behaviour.json` says: {"ATTEMPT/RANK": {...}}, `*` for any attempt.

`steps`: how many, of `step_s` seconds each; every one is written to the ledger by rank 0. `then`: how it ends: done, crash,
user, kill (by SIGKILL), exit (without an outcome), hang (deaf to SIGTERM), linger (done, but the process stays), stop (by
SIGSTOP), hold (Python's lock, in a call that does not return), loop (in a call that does not return, without the lock).
`forget_parent`: ask the kernel not to kill this process when its parent dies.
`sync`: join the other ranks and meet them at every step, as training does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleetune.launch.pulse import Pulse
from fleetune.spec.records import Outcome
from fleetune.spec.run_folder import RunFolder, append_line, write_json

_stop = False


def main(arguments: list[str]) -> int:
    folder, attempt = RunFolder(Path(arguments[0])), int(arguments[2])
    rank = int(os.environ["RANK"])
    plans = json.loads((folder.path / "behaviour.json").read_text())
    plan = plans.get(f"{attempt}/{rank}") or plans.get(f"*/{rank}") or {}
    if plan.get("forget_parent"):
        import ctypes

        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    signal.signal(signal.SIGTERM, _on_term)
    (folder.path / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    (folder.path / f"environment-{attempt}-{rank}").write_text(json.dumps(dict(os.environ)))
    print(f"rank {rank} of attempt {attempt} speaks", flush=True)
    world = None
    pulse = Pulse.begin(rank)
    try:
        if plan.get("sync"):
            from fleetune.parallel.world import World

            world = World.join(attempt=attempt, timeout_s=60)
        step, stopped = run_steps(folder, attempt, rank, plan, world, pulse)
        if stopped:
            save(folder, step)
            return end(folder, attempt, rank, "preempted", f"saved after step {step}", 75)
        pulse.at("step", step + 1)
        return finish(folder, attempt, rank, plan)
    except Exception as error:
        traceback.print_exc()
        return end(folder, attempt, rank, "crash", f"{type(error).__name__}: {error}", 1)


def run_steps(folder: RunFolder, attempt: int, rank: int, plan: dict[str, Any], world: Any, pulse: Pulse) -> tuple[int, bool]:
    """(the last step made, whether some rank was asked to stop)."""
    first = plan.get("first", 0)
    for step in range(first + 1, first + plan.get("steps", 0) + 1):
        pulse.at("step", step)
        time.sleep(plan.get("step_s", 0.0))
        if world.any(_stop) if world is not None else _stop:
            return step - 1, True
        if rank == 0:
            append_line(folder.ledger, {"attempt": attempt, "step": step})
        pulse.step_done()
    return first + plan.get("steps", 0), False


def finish(folder: RunFolder, attempt: int, rank: int, plan: dict[str, Any]) -> int:
    then = plan.get("then", "done")
    if then == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "exit":
        return plan.get("code", 1)
    if then == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    if then == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if then in ("hold", "loop"):
        import ctypes

        (ctypes.PyDLL if then == "hold" else ctypes.CDLL)(None).sleep(3600)
    if then == "crash":
        raise RuntimeError("the tiny worker broke")
    if then == "user":
        return end(folder, attempt, rank, "user", "give another --data", 2)
    if then == "checkpoint-and-kill":
        save(folder, plan["first"] + plan["steps"])
        os.kill(os.getpid(), signal.SIGKILL)
    code = end(folder, attempt, rank, "done", "", 0)
    if then == "linger":
        time.sleep(3600)
    return code


def save(folder: RunFolder, step: int) -> None:
    checkpoint = folder.checkpoints / f"step-{step:06d}"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "manifest.json").write_text("{}")


def end(folder: RunFolder, attempt: int, rank: int, kind: str, cause: str, code: int) -> int:
    write_json(folder.outcome(rank, attempt), asdict(Outcome(kind, cause, code, rank, 0, attempt)))
    sys.stdout.flush()
    return code


def _on_term(number: int, frame: Any) -> None:
    global _stop
    _stop = True
