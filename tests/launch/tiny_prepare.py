"""A preparation that does as its arguments say: `--then ok|user|crash|kill|wait`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(arguments: list[str]) -> int:
    then = arguments[arguments.index("--then") + 1] if "--then" in arguments else "ok"
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
