"""`fleetune compare`: several models or settings at the same time, each on its share of the devices, one table at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from fleetune.cli.flags import Flags, one_word, switch
from fleetune.cli.sweep import Candidate, Sweep, read_sweep, settings_of
from fleetune.cli.words import say
from fleetune.launch.devices import count_devices, usable_cores
from fleetune.spec.errors import EXIT_DONE, EXIT_PREEMPTED, UserError
from fleetune.spec.run_folder import RunFolder, read_json
from fleetune.spec.yaml_file import dump

ABOUT = """Train several models, or one with several settings, and compare them.

SWEEP.yaml has `runs:` (a name and settings each), or `grid:` (settings with a list of values each: every combination is a
run), or both; `common:` settings of all; `gpus:` processes of each run; `at_once:` runs at the same time (empty: as many as
there are devices for); `folder:` where the run folders go. A run that fails does not stop the others. The same command goes
on where it was stopped."""
_COLUMNS = ("run", "loss before", "loss after", "perplexity", "exact match", "tokens/s", "seconds", "memory", "state")


def flags() -> Flags:
    return Flags("compare", ABOUT, usage="SWEEP.yaml [FLAGS]", own=[switch("--json", "Print the table as JSON.")])


def run(words: Sequence[str]) -> int:
    typed = flags().read(words)
    if typed is None:
        return EXIT_DONE
    sweep = read_sweep(Path(one_word(typed, "sweep", "fleetune compare SWEEP.yaml")))
    comparison = Comparison(sweep)
    code = comparison.run()
    rows = sorted((comparison.row(candidate) for candidate in sweep.candidates), key=_order)
    print(json.dumps(rows, ensure_ascii=False) if typed.own["json"] else "\n".join(_table(rows)))
    return code


@dataclass
class _Job:
    candidate: Candidate
    process: subprocess.Popen[bytes]
    devices: list[int]
    began: float = field(default_factory=time.monotonic)


@final
class Comparison:
    """The runs of a sweep, at most as many at a time as there are devices for. Every run is a `fleetune train` of its own."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._kind, count = count_devices("auto")
        cores = usable_cores()
        self._free = list(range(count if self._kind == "cuda" else max(cores, self._most())))
        self._at_once = sweep.at_once or max(1, len(self._free) // sweep.gpus)
        self._threads = max(1, cores // (self._at_once * sweep.gpus))
        self._codes: dict[str, int] = {}
        self._jobs: list[_Job] = []
        self._stopping = False
        if self._kind == "cuda" and self._most() > count:
            raise UserError(f"a run asks for {self._most()} GPUs, and this machine has {count}: give fewer as gpus")

    def run(self) -> int:
        """Run what is not done yet; returns 0, or the code of a run that failed, or 75 when asked to stop."""
        waiting = [candidate for candidate in self._sweep.candidates if not self._is_done(candidate)]
        done = len(self._sweep.candidates) - len(waiting)
        if done:
            say(f"{done} of {len(self._sweep.candidates)} runs are done already")
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._jobs or (waiting and not self._stopping):
                while waiting and not self._stopping and self._has_room(waiting[0]):
                    self._start(waiting.pop(0))
                self._collect()
                time.sleep(0.2)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            for job in self._jobs:
                job.process.kill()
        if self._stopping:
            say("asked to stop: the same command goes on")
            return EXIT_PREEMPTED
        return next((code for code in self._codes.values() if code), EXIT_DONE)

    def row(self, candidate: Candidate) -> dict[str, Any]:
        """One line of the table: figures of its summary, or what became of it."""
        folder = RunFolder(self._sweep.folder / candidate.name)
        row: dict[str, Any] = {"run": candidate.name, "folder": str(folder.path), "state": self._state(candidate)}
        if folder.summary.is_file():
            summary = read_json(folder.summary)
            before, after = summary["before"] or {}, summary["after"] or {}
            seconds = summary["training_s"]
            row |= {
                "loss_before": before.get("loss"),
                "loss_after": after.get("loss"),
                "perplexity": after.get("perplexity"),
                "exact_match": after.get("exact_match"),
                "tokens_per_s": summary["tokens"] / seconds if seconds else None,
                "training_s": seconds,
                "peak_memory_bytes": summary["peak_memory_bytes"],
            }
        return row

    def _most(self) -> int:
        return max(int(candidate.values.get("gpus", self._sweep.gpus)) for candidate in self._sweep.candidates)

    def _needed(self, candidate: Candidate) -> int:
        return int(candidate.values.get("gpus", self._sweep.gpus))

    def _has_room(self, candidate: Candidate) -> bool:
        return len(self._jobs) < self._at_once and len(self._free) >= self._needed(candidate)

    def _is_done(self, candidate: Candidate) -> bool:
        return RunFolder(self._sweep.folder / candidate.name).summary.is_file()

    def _state(self, candidate: Candidate) -> str:
        if self._is_done(candidate):
            return "done"
        code = self._codes.get(candidate.name)
        if code is None:
            return "not begun"
        return "stopped" if code == EXIT_PREEMPTED else f"failed: {_last_error(self._log(candidate))}"

    def _log(self, candidate: Candidate) -> Path:
        return self._sweep.folder / f"{candidate.name}.log"

    def _start(self, candidate: Candidate) -> None:
        """Start one run on devices of its own. It is in a session of its own: a Ctrl-C reaches it through us, once."""
        self._sweep.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings = settings_of(self._sweep, candidate)
        if self._kind == "cpu":
            settings.setdefault("threads", self._threads)
        file = self._sweep.folder / f"{candidate.name}.yaml"
        file.write_text(dump(settings), encoding="utf-8")
        devices = [self._free.pop(0) for _ in range(self._needed(candidate))]
        environment = dict(os.environ)
        if self._kind == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(_visible()[device] for device in devices)
        with open(self._log(candidate), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fleetune.cli.main", "train", str(file)],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._jobs.append(_Job(candidate, process, devices))
        say(f"{candidate.name} begins ({len(devices)} {'GPUs' if self._kind == 'cuda' else 'processes'})")

    def _collect(self) -> None:
        for job in [job for job in self._jobs if job.process.poll() is not None]:
            self._jobs.remove(job)
            self._free = sorted([*self._free, *job.devices])
            self._codes[job.candidate.name] = job.process.returncode
            say(f"{job.candidate.name}: {self._state(job.candidate)} after {time.monotonic() - job.began:.0f} s")

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True
        for job in self._jobs:
            job.process.send_signal(signal.SIGTERM)


def _visible() -> list[str]:
    """The devices of this machine by the names that CUDA_VISIBLE_DEVICES gives them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(count_devices("cuda")[1])]


def _last_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), f"see {log}")


def _order(row: dict[str, Any]) -> tuple[bool, float, str]:
    loss = row.get("loss_after")
    return loss is None, loss if loss is not None else 0.0, row["run"]


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    def cell(value: Any, form: str = ".4f", scale: float = 1.0, unit: str = "") -> str:
        return "-" if value is None else f"{value / scale:{form}}{unit}"

    lines = [_COLUMNS] + [
        (
            row["run"],
            cell(row.get("loss_before")),
            cell(row.get("loss_after")),
            cell(row.get("perplexity"), ".2f"),
            cell(row.get("exact_match"), ".1f", 0.01, " %"),
            cell(row.get("tokens_per_s"), ".0f"),
            cell(row.get("training_s"), ".1f"),
            cell(row.get("peak_memory_bytes"), ".2f", 1e9, " GB"),
            row["state"],
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines]
