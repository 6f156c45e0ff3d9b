"""One rank of one attempt: `python -m fleetune.training.worker RUN_FOLDER --attempt N`.

Started by the supervisor (one process) or by the agent (several), or by a person's own torchrun. Whatever happens, the
rank's outcome is written into the run folder before the process ends, and a failing rank takes part in no collective.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from fleetune.launch.pulse import Pulse
from fleetune.spec.errors import EXIT_CRASH, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER, Preempted, UserError
from fleetune.spec.records import Outcome
from fleetune.spec.run_folder import RunFolder, write_json
from fleetune.training.signals import StopRequest

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fleetune.training.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    arguments = parser.parse_args(argv)
    return run(RunFolder(arguments.folder), arguments.attempt)


def run(folder: RunFolder, attempt: int) -> int:
    """Run one rank to its end; returns the exit code, after writing the outcome."""
    stop = StopRequest().install()
    pulse = Pulse.begin(rank_of())
    kind, cause, code, detail = "done", "", EXIT_DONE, {}
    try:
        train_one_rank(folder, attempt, stop, pulse)
    except Preempted as preempted:
        kind, cause, code = "preempted", str(preempted), EXIT_PREEMPTED
    except UserError as error:
        kind, cause, code = "user", str(error), EXIT_USER
        print(f"error: {error}", file=sys.stderr)
    except BaseException as error:
        kind, cause, code = "crash", f"{type(error).__name__}: {error}", EXIT_CRASH
        traceback.print_exc()
        if ran_out_of_memory(error):
            cause = (
                f"out of memory: {cause}; give --dynamic-batch-size, a smaller --micro-batch-size or --gradient-checkpointing"
            )
            detail = {"out_of_memory": True}
    write_outcome(folder, attempt, Outcome(kind, redacted(cause), code, rank_of(), node_of(), attempt, detail=detail))
    return code


def ran_out_of_memory(error: BaseException) -> bool:
    from fleetune.parallel.out_of_memory import is_out_of_memory

    return is_out_of_memory(error)


def train_one_rank(folder: RunFolder, attempt: int, stop: StopRequest, pulse: Pulse) -> None:
    from fleetune.monitor.logs import configure_logging
    from fleetune.spec.read import read_run
    from fleetune.training.build import build
    from fleetune.training.finish import finish
    from fleetune.training.loop import train

    spec = read_run(folder).spec
    configure_logging(level=spec.output.log_level)
    with build(spec, folder, attempt, stop, pulse) as parts:
        train(parts.run, parts.steps)
        pulse.at("finish")
        finish(parts)


def write_outcome(folder: RunFolder, attempt: int, outcome: Outcome) -> None:
    path = folder.outcome(outcome.rank, attempt)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    write_json(path, asdict(outcome))


def redacted(text: str) -> str:
    from fleetune.monitor.logs import redact

    return redact(text)


def rank_of() -> int:
    return int(os.environ.get("RANK", "0"))


def node_of() -> int:
    return int(os.environ.get("GROUP_RANK", "0"))


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: a process group's or a library's cleanup must not hang a rank that has ended.
    os._exit(exit_code)
