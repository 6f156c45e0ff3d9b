"""The run folder: the interface between launcher, worker, watcher and person. This file knows where everything lies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetune.spec.records import FORMAT_VERSION


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Creating the object touches nothing; `create` makes the folder, private to its owner."""

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "run.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def prepared(self) -> Path:
        return self.path / "prepared.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def events(self) -> Path:
        """Rows with `event` (what), `attempt`, `rank`, `node`, `time` (seconds since 1970), and where known `step`, `cause`."""
        return self.path / "events.jsonl"

    @property
    def lease(self) -> Path:
        return self.path / "lease.json"

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat"

    @property
    def outcomes(self) -> Path:
        return self.path / "outcomes"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def load(self) -> Path:
        """Rows of how busy each node is: `node`, `host`, `time`, and figures of processor, memory, network and GPUs."""
        return self.path / "load.jsonl"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def log(self, rank: int, attempt: int) -> Path:
        return self.logs / f"rank-{rank:05d}-attempt-{attempt:03d}.log"

    def node_log(self, what: str, node: int, attempt: int) -> Path:
        """The log of a node's own process (`agent`, `prepare`); node 0's has no number in its name."""
        number = f"node-{node}-" if node else ""
        return self.logs / f"{number}{what}-attempt-{attempt:03d}.log"

    def prepared_on(self, node: int) -> Path:
        """What a node's preparation found: each node has caches of its own, also where this folder is shared."""
        return self.prepared if node == 0 else self.path / f"prepared-node-{node}.json"

    @property
    def precision(self) -> Path:
        """`precision`: what the run computes in, found by its first machine before anything else, for all of them."""
        return self.path / "precision.json"

    def outcome(self, rank: int, attempt: int) -> Path:
        return self.outcomes / f"rank-{rank:05d}-attempt-{attempt:03d}.json"

    def exists(self) -> bool:
        """Whether a run was ever started here."""
        return self.spec.exists()

    def create(self) -> None:
        """Make the folder and its rooms with mode 0700. Raises OSError (read-only place, a file in the way)."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.path, 0o700)
        for folder in (self.logs, self.checkpoints, self.outcomes, self.heartbeat):
            folder.mkdir(exist_ok=True, mode=0o700)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` with the format version, aside and renamed: a reader sees the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps({"version": FORMAT_VERSION, **value}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of `write_json`. Raises ValueError for another version or for what is not a JSON object."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    if value.get("version") != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {value.get('version')!r}, this fleetune reads {FORMAT_VERSION}")
    return value


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON row (with the version) by a single write: rows of several processes never mix."""
    line = json.dumps({"version": FORMAT_VERSION, **row}, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = "\n" + line  # a crash tore the last row: this one must not be glued to it
        os.write(descriptor, line.encode("utf-8"))
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of an append-only file, oldest first. A torn last line (a crash while writing) is left out."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # a torn row, ended by the next attempt's first line
            if isinstance(row, dict):
                yield row


def effective_rows(path: Path) -> dict[int, dict[str, Any]]:
    """The rows of `metrics.jsonl` or `ledger.jsonl` by step: a later attempt's row replaces an earlier one's."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_lines(path):
        if "loss" in row or "loss_hex" in row:
            rows[int(row["step"])] = row
    return dict(sorted(rows.items()))
