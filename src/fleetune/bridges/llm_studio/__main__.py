"""`python -m fleetune.bridges.llm_studio cfg.yaml [FLAGS]` trains an experiment of H2O LLM Studio; `--write RUN` writes one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fleetune.bridges.given_rows import write_text
from fleetune.bridges.llm_studio.config import read_config, write_config
from fleetune.spec.errors import EXIT_DONE, EXIT_USER, UserError
from fleetune.spec.read import read_run
from fleetune.spec.run_folder import RunFolder
from fleetune.spec.yaml_file import dump, read_yaml

USAGE = """usage: python -m fleetune.bridges.llm_studio cfg.yaml [FLAGS of fleetune train]
       python -m fleetune.bridges.llm_studio --write RUN [cfg.yaml]"""


def main(words: Sequence[str]) -> int:
    """Returns fleetune's exit code."""
    import fleetune

    try:
        if words[:1] == ["--write"] and len(words) in (2, 3):
            folder = RunFolder(Path(words[1]))
            text = dump(write_config(read_run(folder).spec.flat(), name=folder.path.resolve().name))
            if len(words) == 3:
                Path(words[2]).write_text(text, encoding="utf-8")
            else:
                sys.stdout.write(text)
            return EXIT_DONE
        if not words or words[0].startswith("-"):
            print(USAGE, file=sys.stderr)
            return EXIT_USER
        fields = read_config(read_yaml(Path(words[0])))
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER
    return fleetune.main(["train", write_text(dump(fields), ".yaml"), *words[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
