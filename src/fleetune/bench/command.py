"""One measurement as a program of its own: `python -m fleetune.bench.command REQUEST`, started by `fleetune bench`.

REQUEST is a JSON object: `asked` (the values of `throughput.Asked`), `folder` (where everything is written), `as_json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fleetune.bench.table import lines_of
from fleetune.bench.throughput import Asked, measure
from fleetune.spec.errors import EXIT_DONE, EXIT_USER, UserError


def main(text: str) -> int:
    request = json.loads(text)
    asked = Asked(**{**request["asked"], "data": tuple(request["asked"]["data"])})
    try:
        report = measure(asked, Path(request["folder"]), tell=lambda line: print(line, file=sys.stderr, flush=True))
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER
    print(json.dumps(report.to_json()) if request["as_json"] else "\n".join(lines_of(report)))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
