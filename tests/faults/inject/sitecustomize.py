"""Faults at named points of a worker, put in by the tests: on their PYTHONPATH, this is imported by every process of a run.

`TEST_FAULTS` is a JSON list of {"at": "backward" | "fsync" | "rename" | "load", "count": N, "rank": R or null, "do": "kill" |
"raise" | "hold" | "loop" | "regex" | "stop" | "slow" | "eio", "once": PATH or null}: at the N-th such call in the process of
that rank the fault happens; with `once`, only for whoever makes that file first, so that the next attempt is spared.
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
                    _put_in(fault)
        return None


def _put_in(fault):
    calls = [0]

    def met():
        calls[0] += 1
        if calls[0] == fault["count"] or (fault.get("lasting") and calls[0] > fault["count"]):
            _happen(fault)

    def before(function):
        def with_fault(*arguments, **options):
            met()
            return function(*arguments, **options)

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


def _happen(fault):
    if fault.get("once"):
        try:
            os.close(os.open(fault["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
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
