"""Fine-tune on every process that a launcher starts, as the article about xTuring does it:

    python -m torch.distributed.run --nnodes=2 --nproc_per_node=4 --rdzv_id=12345 --rdzv_backend=c10d \
        --rdzv_endpoint=node1:29500 train_distributed.py

The same command on every node. What is trained may be said behind it (`--model`, `--data`), or in the environment with any
other setting of a run (FLEETUNE_MAX_STEPS=100).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from fleetune.bridges.xturing.models import create_model
from fleetune.spec.errors import EXIT_PREEMPTED, EXIT_USER, Preempted, UserError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2_lora", help="a preset (fleetune presets)")
    parser.add_argument("--data", default="./data", help="a file or folder of rows")
    parser.add_argument("--weights", default=None, help="other weights than the preset's: a hub id or a folder")
    arguments = parser.parse_args()
    try:
        create_model(arguments.model, arguments.weights).finetune(dataset=arguments.data)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(EXIT_USER)
    except Preempted:
        sys.exit(EXIT_PREEMPTED)
