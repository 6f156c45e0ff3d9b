"""A preparation that does as its arguments say: `--then ok|user|crash|kill|wait`, `--only NODE`: on no other one.

The first machine says what all compute in, and each writes down what it was told."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from fleetune.spec.run_folder import RunFolder, write_json


def main(arguments: list[str]) -> int:
    node, only = value_of(arguments, "--node") or "0", value_of(arguments, "--only")
    then = (value_of(arguments, "--then") or "ok") if only in (None, node) else "ok"
    folder = RunFolder(Path(arguments[0]))
    (folder.path / f"told-{node}").write_text(str(value_of(arguments, "--precision")))
    if node == "0" and then != "user":
        write_json(folder.precision, {"precision": "bf16", "device": "cpu"})
    print("looking at the rows", file=sys.stderr)
    (Path(arguments[0]) / "pid-prepare").write_text(str(os.getpid()))
    if then == "user":
        print("error: rows.jsonl has no rows: give another --data", file=sys.stderr)
        return 2
    if then == "crash":
        raise ZeroDivisionError("the preparation broke")
    if then == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "wait":
        time.sleep(3600)
    return 0


def value_of(arguments: list[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None
