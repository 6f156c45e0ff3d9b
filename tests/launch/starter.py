"""A supervisor in a process of its own, for tests that signal or kill it: `python -m launch.starter FOLDER NUM [THEN]`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from fleetune.launch.supervisor import supervise
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import RunFolder
from launch.runs import tiny_launch

if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the tests inherit that it is ignored
    folder, num_processes = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    then = sys.argv[3] if len(sys.argv) > 3 else "ok"
    try:
        sys.exit(supervise(folder, tiny_launch(num_processes, prepare_arguments=("--then", then))))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
