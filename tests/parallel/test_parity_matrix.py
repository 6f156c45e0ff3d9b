"""Every form of the engines against one process, every method: the table in docs/layouts.md is written from these runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetune.spec.layout import Layout
from parallel import parity
from parallel.ranks import Ranks
from parallel.test_sharded import check

pytestmark = pytest.mark.long

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
BEGIN, END = "<!-- parity: written by tests/parallel/test_parity_matrix.py -->", "<!-- end of parity -->"
METHODS = ("full", "lora", "dora", "rslora")
STEPS = 10
#: Forms of the engines. Another engine's forms stand here too, as soon as it has some.
LAYOUTS = (
    Layout(replicate=2),
    Layout(shard=2),
    Layout(shard=4),
    Layout(replicate=2, shard=2),
    Layout(tensor=2),
    Layout(replicate=2, tensor=2),
    Layout(shard=2, tensor=2),
)


@pytest.fixture(scope="module")
def one_process(ranks: Ranks, tiny_llama: Path) -> dict[str, Any]:
    return {method: ranks.run(parity.run, 1, {}, str(tiny_llama), method, STEPS, {})[0] for method in METHODS}


@pytest.fixture(scope="module")
def found() -> Iterator[dict[tuple[Layout, str], float]]:
    """Largest difference of a loss by layout and method; written into the document when all are there."""
    differences: dict[tuple[Layout, str], float] = {}
    yield differences
    if len(differences) == len(LAYOUTS) * len(METHODS):
        text = DOCUMENT.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table(differences)}{END}{after}", encoding="utf-8")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_it_trains_as_one_process(
    ranks: Ranks, tiny_llama: Path, one_process: Any, found: dict[tuple[Layout, str], float], layout: Layout, method: str
) -> None:
    one = one_process[method]
    many = ranks.run(parity.run, layout.world_size, layout.to_json(), str(tiny_llama), method, STEPS, {})
    check(one, many)
    found[layout, method] = max(abs(row[0] - wanted[0]) for row, wanted in zip(many[0]["rows"], one["rows"]))


def table(found: dict[tuple[Layout, str], float]) -> str:
    lines = [f"| layout | processes | {' | '.join(METHODS)} |", "|---|---|" + "---|" * len(METHODS)]
    for layout in LAYOUTS:
        cells = " | ".join(rounded_up(found[layout, method]) for method in METHODS)
        lines.append(f"| {layout.describe()} | {layout.world_size} | {cells} |")
    return "\n".join(lines) + "\n"


def rounded_up(difference: float) -> str:
    """To a power of ten, at least 1e-06: what is below is rounding."""
    return f"≤ 1e{max(-6, math.ceil(math.log10(difference or 1e-9))):03d}".replace("e-0", "e-0")
