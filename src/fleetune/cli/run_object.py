"""The same verbs in Python: `fleetune.train(...)` gives a `Run`, which evaluates, generates and exports."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetune.spec.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_USER, Preempted, UserError
from fleetune.spec.given import arguments_given
from fleetune.spec.run_folder import RunFolder, read_json

if TYPE_CHECKING:
    from fleetune.planning.plan import Plan
    from fleetune.training.export import ExportReport
    from fleetune.training.generation import Generator

Text = str | os.PathLike[str]


class Run:
    """A finished run. folder: its run folder. Everything that needs the model loads it in this process."""

    def __init__(self, folder: Text) -> None:
        self.folder = Path(folder)
        if not RunFolder(self.folder).exists():
            raise UserError(f"{folder} is no run folder: give one that fleetune train made")
        self._generator: Generator | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json: figures before and after, time, tokens, memory, and where the result is."""
        try:
            return read_json(RunFolder(self.folder).summary)
        except FileNotFoundError:
            raise UserError(f"the run {self.folder} has not ended: go on with fleetune.train(..., resume=True)") from None

    def evaluate(self, data: Text | Sequence[Text], *, max_rows: int | None = None, **fields: Any) -> dict[str, Any]:
        """As `fleetune evaluate --json`: loss, perplexity, exact_match, rows, trained_tokens. fields: as its flags."""
        from dataclasses import asdict

        from fleetune.cli.evaluate import evaluated
        from fleetune.cli.reading import read_fields

        spec = read_fields({**fields, "data": data}, str(self.folder), said="argument", required=("model", "data"))
        return asdict(evaluated(spec, max_rows=max_rows))

    def generate(
        self,
        prompt: str | Sequence[dict[str, Any]],
        *,
        system: str | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        **drawing: float,
    ) -> str:
        """One reply. prompt: the user's turn, or a whole conversation of {role, content}. The model stays loaded.

        drawing: temperature, top_p, top_k or penalty_alpha, as the flags of `fleetune generate`; where none is given, the
        preset's way, or else always the likeliest token.
        """
        from fleetune.cli.generate import drawn
        from fleetune.cli.reading import read_fields

        length = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        spec = read_fields({**length, "seed": seed}, str(self.folder), said="argument")
        sampling = drawn(spec, _checked(drawing), has_length=max_new_tokens is not None)
        if self._generator is None:
            from fleetune.cli.generate import opened

            self._generator = opened(spec)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        return self._generator.reply(turns, sampling)

    def export(self, to: str = "merged", out: Text | None = None, precision: str | None = None) -> ExportReport:
        """Write the result for other programs, checked: `adapter` or `merged`. Raises CheckFailed where it differs.

        precision: `fp32`, `bf16` or `fp16` weights; else the run's, and fp32 after full fine-tuning.
        """
        from fleetune.training.export import export_run

        return export_run(str(self.folder), to=to, out=None if out is None else Path(out), precision=precision)


def _checked(drawing: dict[str, float]) -> dict[str, float]:
    limits = {"temperature": (0, math.inf), "top_p": (0, 1), "top_k": (1, math.inf), "penalty_alpha": (0, 1)}
    for name, value in drawing.items():
        if name not in limits:
            raise UserError(f"generate takes no argument {name}: give one of {', '.join(limits)}")
        low, high = limits[name]
        if not low <= value <= high:
            raise UserError(f"{name} {value} is not between {low} and {high}: give a number that is")
    return drawing


def train(*, file: Text | None = None, **fields: Any) -> Run:
    """Train, or go on with a run (`resume=True`), in processes of its own; progress is shown on standard error. Where a foreign
    launcher has started this process (torchrun), it is itself one of the ranks.

    fields: as the flags of `fleetune train`, with underscores (`model`, `data`, `learning_rate`, ...). file: a RUN.yaml.
    Raises UserError (with `.problems`, all of them) for what is yours to mend, Preempted where the run was asked to stop
    and has saved, RuntimeError for a crash.
    """
    from fleetune.cli.intent import work_out
    from fleetune.cli.smoke import refuse
    from fleetune.cli.start import start
    from fleetune.cli.torchrun import is_foreign, start_as_rank
    from fleetune.cli.words import say

    given, path = arguments_given(fields), Path(file) if file is not None else None
    if is_foreign(os.environ):
        finished = start_as_rank(given, path, tell=say, show=lambda intent: None)
    else:
        intent = work_out(given, path)
        refuse(intent, "fleetune.train")
        finished = start(intent, tell=say)
    if finished.exit_code == EXIT_USER:
        raise UserError(*(finished.problems() or ["the run found something to mend: see its logs"]))
    if finished.exit_code == EXIT_PREEMPTED:
        raise Preempted(f"the run {finished.folder.path} was asked to stop: go on with fleetune.train(..., resume=True)")
    if finished.exit_code != EXIT_DONE:
        last = finished.said[-1] if finished.said else "see its logs"
        raise RuntimeError(f"the run {finished.folder.path} has crashed: {last}")
    return Run(finished.folder.path)


def plan(*, file: Text | None = None, **fields: Any) -> Plan:
    """What a run would be, as `fleetune plan`; nothing is written. Raises UserError with everything that cannot be."""
    from fleetune.cli.intent import work_out

    return work_out(arguments_given(fields), Path(file) if file is not None else None, is_start=False).plan
