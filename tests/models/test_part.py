"""A model in parts computes what the whole model computes, and holds no more than its parts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import tiny
from fleetune.models.build import load_model
from fleetune.models.objective import TokenLoss
from fleetune.models.wanted import WantedAdapter, WantedModel, load_stage, load_whole
from fleetune.spec.errors import UserError
from fleetune.spec.stages import RUNS_PER_RANK, Stage
from micro_batches import random_batch

#: Families whose blocks take and give different things, or are called with other arguments; heads tied and not.
FAMILIES = {
    "llama": {"num_hidden_layers": 4},
    "gpt2": {"n_layer": 4},
    "gemma": {"num_hidden_layers": 4},
    "bloom": {"n_layer": 4, "num_hidden_layers": 4},
    "opt": {"num_hidden_layers": 4},
    "mixtral": {"num_hidden_layers": 4},
    "gpt_oss": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mamba": {"num_hidden_layers": 4},
}
CPU = torch.device("cpu")


def stage_of(rank: int, schedule: str = "1f1b") -> Stage:
    return Stage.of_rank(rank, 2, schedule)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.trained() if p.grad is not None}


def through_parts(parts, batch, runs) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, summed gradients) of a micro-batch that goes through `runs` of (model, place of the run), by hand."""
    entering, leaving = [], []
    for number, (model, place) in enumerate(runs):
        laid_out = model.lay_out(batch)
        states = leaving[-1].detach().requires_grad_() if number else None
        entering.append(states)
        leaving.append(model.part.run(laid_out, model.part.runs[place], states))
    last = runs[-1][0]
    loss, _ = TokenLoss()(leaving[-1], last.lay_out(batch), last.head)
    loss.backward()
    for number in reversed(range(len(runs) - 1)):
        leaving[number].backward(entering[number + 1].grad)
    summed: dict[str, torch.Tensor] = {}
    for model in parts:
        for name, gradient in gradients(model).items():
            summed[name] = summed.get(name, 0) + gradient
    return loss.item(), summed


QUICK = [("llama", "interleaved"), ("gpt2", "1f1b"), ("bloom", "1f1b")]
LONG = [(family, schedule) for family in FAMILIES for schedule in RUNS_PER_RANK if (family, schedule) not in QUICK]


@pytest.mark.parametrize(("family", "schedule"), QUICK + [pytest.param(*pair, marks=pytest.mark.long) for pair in LONG])
def test_parts_compute_what_the_whole_computes(tmp_path: Path, family: str, schedule: str):
    folder = tiny.write_model(tmp_path / family, family, **FAMILIES[family])
    batch = random_batch([5, 9, 3, 40])
    whole = load_model(folder, dtype="fp32", device="cpu", trainable=True)
    laid_out = whole.lay_out(batch)
    loss, _ = TokenLoss()(whole.hidden(laid_out), laid_out, whole.head)
    loss.backward()
    parts = [
        load_model(folder, dtype="fp32", device="cpu", trainable=True, stage=stage_of(rank, schedule)) for rank in range(2)
    ]
    runs = [(part, place) for place in range(len(parts[0].part.runs)) for part in parts]
    found, summed = through_parts(parts, batch, runs)
    assert found == loss.item()
    expected = gradients(whole)
    assert {name: gradient for name, gradient in summed.items() if name in expected}.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(summed[name], gradient, rtol=1e-5, atol=1e-6)
    assert list(parts[0].trained_shapes()) == list(parts[1].trained_shapes()) == [name for name, _ in whole.trained()]


def test_every_weight_lies_where_it_is_used_and_big_ones_nowhere_else(tmp_path: Path):
    for family, tied in (("llama", False), ("gpt2", True)):
        folder = tiny.write_model(tmp_path / family, family, **FAMILIES[family])
        whole = load_model(folder, dtype="fp32", device="cpu", trainable=False)
        parts = [load_model(folder, dtype="fp32", device="cpu", trainable=False, stage=stage_of(rank)) for rank in range(2)]
        anatomy = whole.anatomy
        assert anatomy.head_tied == tied
        for rank, part in enumerate(parts):
            held = {name for name, p in part.module.named_parameters() if not p.is_meta}
            for index, block in enumerate(anatomy.block_names()):
                names = {name for name, _ in whole.module.named_parameters() if name.startswith(f"{block}.")}
                assert names <= held if index // 2 == rank else not names & held
            embedding = part.module.get_submodule(anatomy.embedding).weight
            head = part.module.get_submodule(anatomy.head).weight
            assert embedding.is_meta == (rank == 1 and not tied)
            assert head.is_meta == (rank == 0 and not tied)
            assert (head is embedding) == tied
            assert part.module.get_submodule(anatomy.final_norm).weight.is_meta is False


@pytest.mark.parametrize("kind", ["lora", "dora", "rslora"])
def test_an_adapter_lies_in_the_parts_as_in_the_whole(tmp_path: Path, kind):
    folder = tiny.write_model(tmp_path / "llama", "llama", num_hidden_layers=4)
    wanted = WantedModel(folder, "fp32", adapter=WantedAdapter(kind, 4, 8.0, 0.0, ()), seed=5)
    whole = load_whole(wanted, CPU)
    parts = [load_stage(wanted, CPU, stage_of(rank)) for rank in range(2)]
    expected = dict(whole.trained())
    assert list(parts[0].trained_shapes()) == list(expected) == list(parts[1].trained_shapes())
    found = {name: parameter for part in parts for name, parameter in part.trained()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert parts[0].adapter == whole.adapter == parts[1].adapter


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gemma4_text", {"intermediate_size": 96, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 12}),
        (
            "zamba2",
            {
                "num_hidden_layers": 4,
                "intermediate_size": 96,
                "mamba_ngroups": 1,
                "n_mamba_heads": 4,
                "mamba_headdim": 24,
                "num_mem_blocks": 1,
                "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
                "hybrid_layer_ids": [1, 3],
            },
        ),
    ],
)
def test_a_family_whose_blocks_hand_on_more_than_hidden_states_is_refused(tmp_path: Path, family: str, more: dict):
    """Their later blocks read the embeddings again, which no stage but the first has."""
    folder = tiny.write_model(tmp_path / family, family, **more)
    with pytest.raises(UserError, match="cannot be cut into stages: its blocks hand more to each other than hidden states"):
        load_model(folder, dtype="fp32", device="cpu", trainable=True, stage=stage_of(1))


def test_more_stages_than_blocks_are_refused(tiny_llama: Path):
    with pytest.raises(UserError, match="2 blocks, and they cannot be divided into 4 runs"):
        load_model(tiny_llama, dtype="fp32", device="cpu", trainable=True, stage=Stage.of_rank(0, 4, "1f1b"))


@pytest.mark.long
def test_loading_a_part_never_holds_more_than_the_part(tmp_path: Path):
    """Anonymous memory of a process of its own, watched while it loads: pages of mapped files belong to nobody."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 384, "intermediate_size": 1536}
    folder = tiny.write_model(tmp_path / "llama", "llama", **sizes)
    num_bytes = (folder / "model.safetensors").stat().st_size
    whole, part = (grown_elsewhere(folder, rank) for rank in ("whole", "1"))
    assert num_bytes > 100e6
    assert whole > 0.9 * num_bytes, "the measurement does not see what is loaded"
    assert part < 0.5 * num_bytes + 0.1 * num_bytes


def grown_elsewhere(folder: Path, rank: str) -> int:
    """`grown_by_loading` in a fresh process."""
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parents[2] / "src"), str(here.parents[1])])
    command = [sys.executable, str(here), str(folder), rank]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def grown_by_loading(folder: str, rank: int | None) -> int:
    """Bytes of anonymous memory that loading takes at most, above those of a process that has loaded a tiny model."""
    stage = None if rank is None else stage_of(rank)
    load_model(folder, dtype="fp32", device="cpu", trainable=False)  # imports, caches
    start, peak, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(folder, dtype="fp32", device="cpu", trainable=True, stage=stage)
    done.set()
    watcher.join()
    assert any(True for _ in model.trained())
    return max(peak[0], anonymous_bytes()) - start


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


if __name__ == "__main__":
    print(grown_by_loading(sys.argv[1], None if sys.argv[2] == "whole" else int(sys.argv[2])))
