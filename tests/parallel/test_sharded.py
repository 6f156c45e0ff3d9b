from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel import parity
from parallel.ranks import Ranks

ALONE: dict[str, int] = {}


def check(one: dict[str, Any], many: list[dict[str, Any]], *, norms: float = 1e-4) -> None:
    """One process and many, fp32: losses within 1e-6 at the first step and 1e-4 later; the same counts; ranks agree."""
    assert all(answer["rows"] == many[0]["rows"] for answer in many), "the ranks disagree"
    assert len({answer["fingerprint"] for answer in many}) == 1
    rows = many[0]["rows"]
    assert rows[0][0] == pytest.approx(one["rows"][0][0], abs=1e-6)
    for row, expected in zip(rows, one["rows"], strict=True):
        assert row[0] == pytest.approx(expected[0], abs=1e-4)
        assert row[1] == pytest.approx(expected[1], rel=norms)
        assert row[2:] == expected[2:]
    assert many[0]["evaluated"][0] == pytest.approx(one["evaluated"][0], rel=1e-5)
    assert many[0]["evaluated"][1] == one["evaluated"][1]
    assert many[0]["first"] == pytest.approx(one["first"], abs=1e-5), "the weights at the start differ"
    assert many[0]["last"] == pytest.approx(one["last"], abs=2e-3)


@pytest.mark.claim(
    "H26",
    command="fleetune train --shard 2",
    seen="one model in pieces over two ranks, each with half of it, trains as one process",
)
def test_full_shard_trains_as_one_process_and_keeps_half(ranks: Ranks, tiny_llama: Path) -> None:
    one = ranks.run(parity.run, 1, ALONE, str(tiny_llama), "full", 4, {})[0]
    many = ranks.run(parity.run, 2, {"shard": 2}, str(tiny_llama), "full", 4, {})
    check(one, many)
    parameter_bytes, optimizer_bytes, trained, _ = one["held"]
    for answer in many:
        assert answer["held"][0] == parameter_bytes / 2 and answer["held"][1] == optimizer_bytes / 2
        assert answer["held"][2] == trained
        assert answer["sent"] > parameter_bytes, "FSDP's own traffic is not counted"


def test_tensor_parallel_with_dora_and_dropout_trains_as_one_process(ranks: Ranks, tiny_llama: Path) -> None:
    more = {"dropout": 0.2}
    one = ranks.run(parity.run, 1, ALONE, str(tiny_llama), "dora", 4, more)[0]
    many = ranks.run(parity.run, 2, {"tensor": 2}, str(tiny_llama), "dora", 4, more)
    check(one, many)
    assert many[0]["held"][0] < one["held"][0]


def test_a_saved_adapter_goes_on_in_pieces(ranks: Ranks, tiny_llama: Path, tmp_path: Path) -> None:
    from fleetune.models.adapters import add_adapter
    from fleetune.models.build import load_model

    model = load_model(tiny_llama, dtype="fp32", device="cpu", trainable=False)
    add_adapter(model, adapter="dora", rank=3, alpha=6.0, dropout=0.0, targets=("q_proj", "down_proj"), seed=1)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(model.trained()):
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    adapter = str(tmp_path / "adapter")
    model.save(model.trained(), Path(adapter), base_model=str(tiny_llama))
    one = ranks.run(parity.run, 1, ALONE, str(tiny_llama), adapter, 3, {})[0]
    check(one, ranks.run(parity.run, 2, {"shard": 2}, str(tiny_llama), adapter, 3, {}))


def test_a_mixture_with_adapters_on_its_experts_trains_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    import tiny

    mixtral = str(tiny.write_model(tmp_path / "mixtral", "mixtral"))
    more = {"targets": ("q_proj", "gate_up_proj", "down_proj")}
    one = ranks.run(parity.run, 1, ALONE, mixtral, "lora", 3, more)[0]
    assert any("experts" in name for name in one["first"])
    check(one, ranks.run(parity.run, 2, {"shard": 2}, mixtral, "lora", 3, more))


def test_communicating_once_a_step_sends_less_and_trains_the_same(ranks: Ranks, tiny_llama: Path) -> None:
    each = ranks.run(parity.run, 2, {"shard": 2}, str(tiny_llama), "lora", 3, {"gradient_checkpointing": True})
    once = ranks.run(parity.run, 2, {"shard": 2}, str(tiny_llama), "lora", 3, {"accumulate": "once"})
    check(each[0], once)
    assert once[0]["sent"] < each[0]["sent"]


def test_a_checkpoint_of_one_layout_goes_on_in_another(ranks: Ranks, tiny_llama: Path, tmp_path: Path) -> None:
    layouts = [{"shard": 2}, {"replicate": 2}, {"tensor": 2}]
    answers = ranks.run(parity.passed_on, 2, layouts, str(tiny_llama), "full", str(tmp_path / "saved"), {})
    straight, fingerprint = answers[0]["straight"], answers[0]["fingerprint"]
    resumed = answers[0]["resumed"]
    assert resumed["shard 2"] == [straight, fingerprint], "the same layout goes on bit by bit"
    for layout in ("replicate 2", "tensor 2"):
        for row, expected in zip(resumed[layout][0], straight, strict=True):
            assert row == pytest.approx(expected, rel=2e-5)


def test_a_number_that_is_not_finite_on_one_rank_updates_nothing_on_any(ranks: Ranks, tiny_llama: Path) -> None:
    for answer in ranks.run(parity.not_finite, 2, {"shard": 2}, str(tiny_llama)):
        assert answer == {"applied": [True, False, True], "unchanged": True, "as_if_it_had_not_been": True}


def test_tensor_parallel_is_refused_for_a_family_without_a_plan(ranks: Ranks, tmp_path: Path) -> None:
    import tiny

    gpt2 = str(tiny.write_model(tmp_path / "gpt2", "gpt2"))
    said = ranks.run(parity.refused, 2, {"tensor": 2}, gpt2)[0]
    assert said.startswith("tensor 2 and GPT2LMHeadModel, which has no such plan: ") and "Give --shard" in said
