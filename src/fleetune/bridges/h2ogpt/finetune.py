"""`python finetune.py ...`: h2oGPT's command, and that of the article about it, run as `fleetune train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fleetune.bridges.h2ogpt.flags import FLAGS, TOGETHER
from fleetune.bridges.h2ogpt.translate import translate
from fleetune.monitor.logs import redact
from fleetune.spec.errors import EXIT_USER, UserError

ABOUT = """Fine-tune as h2oGPT's finetune.py does: its flags are said in fleetune's words, or refused with the reason.

Its own flags (also as H2OGPT_<FLAG> in the environment): {flags}.
Every flag of fleetune train is taken too; without any, h2oGPT's own defaults count (fleetune presets h2ogpt_finetune).
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command line of finetune.py; returns fleetune's exit code."""
    import fleetune

    words = list(sys.argv[1:] if words is None else words)
    if {"-h", "--help"} & set(words):
        print(ABOUT.format(flags=", ".join(f"--{name}" for name in sorted((*FLAGS, *TOGETHER)))))
        return fleetune.main(["train", "--help"])
    try:
        translated = translate(words, os.environ)
    except UserError as error:
        for problem in error.problems:
            print(redact(f"error: {problem}"), file=sys.stderr)
        return EXIT_USER
    return fleetune.main(["train", *translated])


if __name__ == "__main__":
    sys.exit(main())
