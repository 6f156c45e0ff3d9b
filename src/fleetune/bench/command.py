"""One measurement as a program of its own: `python -m fleetune.bench.command REQUEST`, started by `fleetune bench`.

REQUEST is a JSON object: `measurement` (a key of `MEASUREMENTS`), `asked` (the values of `training_run.Asked`), `folder`
(where everything is written), `as_json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fleetune.bench import memory, scaling, throughput
from fleetune.bench.training_run import Asked
from fleetune.spec.errors import EXIT_DONE, EXIT_USER, UserError


class Report(Protocol):
    def to_json(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]: ...


#: name -> measure(asked, folder, tell=...).
MEASUREMENTS: dict[str, Callable[..., Report]] = {
    "throughput": throughput.measure,
    "scaling": scaling.measure,
    "memory": memory.measure,
}


def main(text: str) -> int:
    request = json.loads(text)
    asked = Asked(**{**request["asked"], "data": tuple(request["asked"]["data"])})
    measure = MEASUREMENTS[request["measurement"]]
    try:
        report = measure(asked, Path(request["folder"]), tell=lambda line: print(line, file=sys.stderr, flush=True))
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER
    print(json.dumps(report.to_json()) if request["as_json"] else "\n".join(report.lines()))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
