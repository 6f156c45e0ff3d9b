"""h2oGPT's command, as the article about it writes it: `python finetune.py --base_model=... --num_nodes=4 ...`.

Every flag is said in the words of `fleetune train`, or refused by name with the reason; `python finetune.py --help` lists them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from fleetune.bridges.h2ogpt.finetune import main

if __name__ == "__main__":
    sys.exit(main())
