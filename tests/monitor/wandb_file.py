"""Reading what W&B wrote offline: records in its own messages, framed as LevelDB frames a log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_FILE_HEADER = 7


def records(path: Path) -> Iterator[Any]:
    """Every record of a `.wandb` file, in order."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, whole = _FILE_HEADER, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if kind == 0:
            break
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def history(folder: Path) -> list[dict[str, float]]:
    """The logged rows of all sessions of the run in `folder`, in order."""
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(path):
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


def identities(folder: Path) -> set[str]:
    """The ids of the runs that the sessions in `folder` belong to."""
    return {
        record.run.run_id
        for path in folder.glob("wandb/offline-run-*/run-*.wandb")
        for record in records(path)
        if record.WhichOneof("record_type") == "run"
    }
