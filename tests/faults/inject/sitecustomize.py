"""Faults at named points of a worker, put in by the tests: on their PYTHONPATH, this is imported by every process of a run.

`TEST_FAULTS` is a JSON list of {"at": "backward" | "fsync" | "rename" | "load" | "disk", "count": N, "rank": R or null, "do":
"kill" | "raise" | "hold" | "loop" | "regex" | "stop" | "slow" | "eio", "once": PATH or null, "after": PATH or null}: at the Nth
such call in the process of that rank the fault happens (`disk`: an operation by which a save changes the disk); with `once`,
only for whoever makes that file first, so that the next attempt is spared, and what was called is written there; with `after`,
only where that file is there already.

{"at": "clock", "rank": R or "supervisor", "offset": S, "jump": S, "after_s": S}: the time of day of that process is so many
seconds off, and jumps when the process is `after_s` old.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import signal
import sys
import time


class _Finder(importlib.abc.MetaPathFinder):
    """Puts the faults in when a worker is about to import its main module; everything else is imported by then."""

    def find_spec(self, name, path=None, target=None):
        if name == "fleetune.training.worker":
            sys.meta_path.remove(self)
            for fault in json.loads(os.environ["TEST_FAULTS"]):
                if fault.get("rank") is None or str(fault["rank"]) == os.environ.get("RANK", "0"):
                    if fault["at"] == "clock":
                        _set_clock(fault)
                    else:
                        _put_in(fault)
        return None


def _set_clock(fault):
    real, began = time.time, time.monotonic()

    def skewed():
        jump = fault.get("jump", 0.0) if time.monotonic() - began > fault.get("after_s", 0.0) else 0.0
        return real() + fault["offset"] + jump

    time.time = skewed


def _put_in(fault):
    calls = [0]

    def met(name):
        calls[0] += 1
        if calls[0] == fault["count"] or (fault.get("lasting") and calls[0] > fault["count"]):
            _happen(fault, name)

    def before(function):
        def with_fault(*arguments, **options):
            met(function.__name__)
            return function(*arguments, **options)

        with_fault.__name__ = function.__name__  # several faults at one place wrap each other
        return with_fault

    if fault["at"] == "backward":
        import torch

        torch.Tensor.backward = before(torch.Tensor.backward)
    elif fault["at"] == "fsync":
        os.fsync = before(os.fsync)
    elif fault["at"] == "rename":
        os.rename, os.replace = before(os.rename), before(os.replace)
    elif fault["at"] == "load":
        from fleetune.checkpoint.store import CheckpointStore

        CheckpointStore.latest = before(CheckpointStore.latest)
    elif fault["at"] == "disk":
        from fleetune.checkpoint import disk

        for name in ("make_folder", "create", "rename", "sync_folder", "remove_file", "remove_folder"):
            setattr(disk.RealDisk, name, before(getattr(disk.RealDisk, name)))
        disk._NewFile.sync = before(disk._NewFile.sync)
        disk._NewFile.write = _now_and_then(disk._NewFile.write, before(disk._NewFile.write))


def _now_and_then(usual, counted):
    """Of the many writes to one file only the first and the twentieth count."""
    calls = {}

    def write(file, data):
        calls[file] = calls.get(file, 0) + 1
        return (counted if calls[file] in (1, 20) else usual)(file, data)

    return write


def _happen(fault, name):
    if fault.get("after") and not os.path.exists(fault["after"]):
        return
    if fault.get("once"):
        try:
            mark = os.open(fault["once"], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(mark, name.encode())
        os.close(mark)
    do = fault["do"]
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif do == "raise":
        raise RuntimeError("the injected fault")
    elif do == "eio":
        raise OSError(5, "Input/output error (injected)")
    elif do == "hold":
        import ctypes

        ctypes.PyDLL(None).sleep(3600)
    elif do == "loop":
        import ctypes

        ctypes.CDLL(None).sleep(3600)
    elif do == "regex":
        import re

        re.match(r"(a+)+$", "a" * 64 + "b")
    elif do == "slow":
        time.sleep(fault.get("seconds", 1.0))


if os.environ.get("TEST_FAULTS"):
    sys.meta_path.insert(0, _Finder())
    if "fleetune.cli.main" in sys.orig_argv:
        for clock in json.loads(os.environ["TEST_FAULTS"]):
            if clock["at"] == "clock" and clock["rank"] == "supervisor":
                _set_clock(clock)
