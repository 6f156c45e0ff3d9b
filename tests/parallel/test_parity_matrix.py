"""Every form of the engines against one process, every method: the table in docs/layouts.md is written from these runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny
from fleetune.spec.layout import Layout
from parallel import parity
from parallel.ranks import Ranks
from parallel.test_sharded import check

pytestmark = pytest.mark.long

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
BEGIN, END = "<!-- parity: written by tests/parallel/test_parity_matrix.py -->", "<!-- end of parity -->"
METHODS = ("full", "lora", "dora", "rslora")
STEPS = 10


@dataclass(frozen=True)
class Form:
    """A layout on the engine that does it. more: what the engine is told beside the layout."""

    name: str
    layout: Layout
    more: tuple[tuple[str, Any], ...] = ()


#: Forms of the engines. Another engine's forms stand here too, as soon as it has some.
FORMS = (
    *(
        Form(layout.describe(), layout)
        for layout in (
            Layout(replicate=2),
            Layout(shard=2),
            Layout(shard=4),
            Layout(replicate=2, shard=2),
            Layout(tensor=2),
            Layout(replicate=2, tensor=2),
            Layout(shard=2, tensor=2),
        )
    ),
    Form("pipeline 2", Layout(pipeline=2)),
    Form("pipeline 2, interleaved", Layout(pipeline=2), (("schedule", "interleaved"),)),
    Form("replicate 2 × pipeline 2", Layout(replicate=2, pipeline=2)),
    *(Form(f"DeepSpeed, ZeRO {stage}", Layout(replicate=2), (("zero", stage),)) for stage in (1, 2, 3)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four blocks: two runs of one block each on every stage of an interleaved pipeline."""
    return str(tiny.write_model(tmp_path_factory.mktemp("four") / "llama", "llama", num_hidden_layers=4))


@pytest.fixture(scope="module")
def one_process(ranks: Ranks, folder: str) -> dict[str, Any]:
    return {method: ranks.run(parity.run, 1, {}, folder, method, STEPS, {})[0] for method in METHODS}


@pytest.fixture(scope="module")
def found() -> Iterator[dict[tuple[str, str], float]]:
    """Largest difference of a loss by form and method; written into the document when all are there."""
    differences: dict[tuple[str, str], float] = {}
    yield differences
    if len(differences) == len(FORMS) * len(METHODS):
        text = DOCUMENT.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table(differences)}{END}{after}", encoding="utf-8")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_it_trains_as_one_process(
    ranks: Ranks, folder: str, one_process: Any, found: dict[tuple[str, str], float], form: Form, method: str
) -> None:
    one, layout = one_process[method], form.layout
    many = ranks.run(parity.run, layout.world_size, layout.to_json(), folder, method, STEPS, dict(form.more))
    check(one, many)
    found[form.name, method] = max(abs(row[0] - wanted[0]) for row, wanted in zip(many[0]["rows"], one["rows"]))


def table(found: dict[tuple[str, str], float]) -> str:
    lines = [f"| layout | processes | {' | '.join(METHODS)} |", "|---|---|" + "---|" * len(METHODS)]
    for form in FORMS:
        cells = " | ".join(rounded_up(found[form.name, method]) for method in METHODS)
        lines.append(f"| {form.name} | {form.layout.world_size} | {cells} |")
    return "\n".join(lines) + "\n"


def rounded_up(difference: float) -> str:
    """To a power of ten, at least 1e-06: what is below is rounding."""
    return f"≤ 1e{max(-6, math.ceil(math.log10(difference or 1e-9))):03d}".replace("e-0", "e-0")
