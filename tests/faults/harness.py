"""Runs of the command as a person starts it, faults done to them, and what must hold afterwards (P1 to P8 of the suite)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fleetune.launch.identity import process_mark
from fleetune.spec.run_folder import read_lines
from journeys.journey import fleetune, losses, write_rows

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"

#: 48 rows, 4 a step: 3 epochs make 36 steps. A save every fourth; dropout is on: masks must not depend on interruptions.
STEPS = ["--sequence-length", "64", "--global-batch-size", "4", "--micro-batch-size", "1", "--no-packing"]
TRAINING = [*STEPS, "--learning-rate", "1e-2", "--checkpoint-every", "4", "--threads", "1"]
DROPOUT = ["--lora-dropout", "0.1"]
CANARY = "hf_canaryCANARYcanaryCANARY0123456789"
#: What a quiet machine needs is multiplied by this: the tests share theirs with others.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "3"))


@dataclass
class Place:
    """A folder with rows and a model, and the runs in it."""

    folder: Path
    model: Path
    runs: list[Faulted] = field(default_factory=list)
    prefix: str = ""

    @staticmethod
    def make(folder: Path, model: Path) -> Place:
        write_rows(folder / "rows.jsonl")
        return Place(folder, model)

    def for_test(self, name: str) -> Place:
        return Place(self.folder, self.model, prefix=re.sub(r"\W+", "-", name) + "-")

    def words(self, run: str, *flags: str, epochs: float = 3, data: str | Path = "rows.jsonl") -> list[str]:
        return [
            "train",
            "--model",
            str(self.model),
            "--data",
            str(data),
            "--run",
            run,
            "--epochs",
            str(epochs),
            *TRAINING,
            *([] if "full" in flags else DROPOUT),
            *flags,
        ]

    def golden(self, *flags: str, epochs: float = 3) -> Path:
        """The undisturbed run with these flags."""
        name = "golden" + re.sub(r"\W+", "-", " ".join((*flags, str(epochs))))
        if not (self.folder / name / "summary.json").exists():
            done = fleetune(*self.words(name, *flags, epochs=epochs), cwd=self.folder, timeout=600)
            assert done.returncode == 0, done.stderr
        return self.folder / name

    def start(
        self, name: str, *flags: str, epochs: float = 3, faults: list[dict[str, Any]] | None = None, **more: Any
    ) -> Faulted:
        words = self.words(self.prefix + name, *flags, epochs=epochs, data=more.pop("data", "rows.jsonl"))
        run = Faulted(self, self.prefix + name, words, faults or [], more.pop("environment", {}))
        self.runs.append(run)
        run.begin()
        return run

    def end_all(self) -> None:
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


@dataclass
class Faulted:
    """One run to which something is done."""

    place: Place
    name: str
    words: list[str]
    faults: list[dict[str, Any]]
    environment: dict[str, str]
    seen: set[int] = field(default_factory=set)
    process: subprocess.Popen[str] = field(init=False)

    @property
    def path(self) -> Path:
        return self.place.folder / self.name

    def begin(self, *more: str) -> None:
        """Start the command, or start it again with further flags."""
        paths = [str(HERE / "inject")] if self.faults else []
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, str(SOURCE)]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_TOKEN": CANARY,
            "TEST_FAULTS": json.dumps(self.faults),
            **self.environment,
        }
        with open(self.place.folder / f"{self.name}.said", "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleetune.cli.main", *self.words, *more],
                cwd=self.place.folder, env=environment, text=True, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def rows(self, name: str = "ledger.jsonl") -> list[dict[str, Any]]:
        return list(read_lines(self.path / name))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("events.jsonl") if row["event"] == kind]

    def wait(self, condition: Callable[[], Any], seconds: float = 60.0, what: str = "") -> Any:
        """The condition's value as soon as it holds, within so many seconds of a quiet machine."""
        deadline = time.monotonic() + seconds * PATIENCE
        while True:
            value = condition()
            if value:
                return value
            assert self.process.poll() is None, f"ended with {self.process.poll()}: {self.text()}"
            assert time.monotonic() < deadline, f"waited in vain {what}: {self.text()}"
            time.sleep(0.01)

    def wait_step(self, step: int, attempt: int = 0) -> None:
        """Return when this step (or a later one) of this attempt (or a later one) is in the ledger."""
        self.wait(
            lambda: any(row["step"] >= step and row["attempt"] >= attempt for row in self.rows()), what=f"for step {step}"
        )

    def workers(self, attempt: int | None = None) -> dict[int, int]:
        """Live workers by rank, as the run folder shows them."""
        found = {}
        for path in (self.path / "heartbeat").glob("rank-*.json"):
            try:
                row = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if row["pid"] and process_mark(row["pid"]) and attempt in (None, row["attempt"]):
                found[int(row["rank"])] = int(row["pid"])
                self.seen.add(int(row["pid"]))
        return found

    def wait_workers(self, number: int, attempt: int = 0) -> dict[int, int]:
        return self.wait(lambda: len(found := self.workers(attempt)) == number and found, what=f"for {number} workers")

    def parent(self, pid: int) -> int:
        return psutil.Process(pid).ppid()

    def store(self) -> int:
        """The store's process: its log lies in the run folder."""
        log = str(self.path / "logs" / "store.log")
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if os.readlink(f"/proc/{child.pid}/fd/1") == log:
                    return child.pid
            except OSError:
                continue
        raise AssertionError("there is no store")

    def living(self) -> list[int]:
        """Every process of the run that lives: it names the run folder, or writes into it."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in (os.getpid(), self.process.pid):
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                output = os.readlink(entry / "fd" / "1")
            except OSError:
                continue
            mine = str(self.path).encode() in words or output.startswith(str(self.path / "logs"))
            if mine and process_mark(int(entry.name)):
                found.append(int(entry.name))
        return found

    def end(self, seconds: float = 120.0) -> int:
        """Wait for the end of the command; its exit code."""
        try:
            code = self.process.wait(seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.text()}") from None
        return code

    def kill(self, *pids: int) -> float:
        """SIGKILL to all of them at once; when (seconds since 1970)."""
        at = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return at

    def text(self) -> str:
        return (self.place.folder / f"{self.name}.said").read_text()

    def verify(self, golden: Path, *flags: str) -> str:
        done = fleetune("verify", self.name, "--against", golden, *flags, cwd=self.place.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        alone = fleetune("verify", self.name, cwd=self.place.folder)
        assert alone.returncode == 0 and "lost 0, repeated 0" in alone.stdout, alone.stdout + alone.stderr
        return done.stdout

    def holds_to(self, golden: Path, *, interval: int = 4, bitwise: bool = True) -> None:
        """P1 (ledger), P2 (losses and weights bitwise), P3 (lost work), P6 and P8 of a run that has come to its end."""
        told = self.verify(golden, *(["--bitwise"] if bitwise else []))
        assert "lost 0, repeated 0" in told
        if bitwise:
            assert losses(self.path) == losses(golden)
            for name in ("adapter", "model"):
                for path in (golden / name).glob("*.safetensors") if (golden / name).is_dir() else ():
                    assert (self.path / name / path.name).read_bytes() == path.read_bytes(), f"{path.name} differs"
        redone = self.account()["recomputed_steps"]
        assert redone <= interval * max(1, len(self.events("failure"))), f"{redone} steps made again"
        self.leaves_nothing()

    def account(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())["account"]

    def leaves_nothing(self) -> None:
        """P6: no process, shared memory or draft is left. P8: no secret in anything that was written."""
        deadline = time.monotonic() + 10
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.living()
        shared = [path.name for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in self.seen)]
        assert not shared, f"left in shared memory: {shared}"
        drafts = [path for path in self.path.rglob("*") if path.name.endswith(".tmp") or ".tmp-" in path.name]
        assert not drafts, f"drafts are left: {drafts}"
        assert not list((self.path / "heartbeat").iterdir())
        for path in [*self.path.rglob("*"), self.place.folder / f"{self.name}.said"]:
            if path.is_file():
                assert CANARY.encode() not in path.read_bytes(), f"a secret is in {path}"

    def failed(self, *words: str, rank: int | None = None) -> dict[str, Any]:
        """P7: the first failure that was told, with these words in its cause, in one line, also to the person."""
        row = self.events("failure")[0]
        assert "\n" not in row["cause"]
        assert all(word in row["cause"] for word in words), row["cause"]
        assert rank is None or row["rank"] == rank
        assert row["cause"][:40] in self.text()
        return row

    def recovered_within(self, seconds: float) -> None:
        """P4: training again within so many seconds of a quiet machine, and in at most half of the time of a cold start."""
        again, cold = self.events("recovered")[0]["recovery_s"], self.events("first_step")[0]["recovery_s"]
        assert again < seconds * PATIENCE, f"training again after {again} s"
        assert again < cold / 2, f"training again after {again} s, a cold start took {cold} s"
