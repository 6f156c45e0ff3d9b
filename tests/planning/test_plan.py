from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleetune.planning.explain import explain
from fleetune.planning.plan import make_plan
from fleetune.spec.errors import UserError
from fleetune.spec.given import flags_given
from fleetune.spec.layout import Layout
from fleetune.spec.model_shape import read_shape
from fleetune.spec.read import resolve


@pytest.fixture(scope="module")
def shape(tiny_llama):
    return read_shape(tiny_llama)


def spec(**values):
    return resolve(flags=flags_given({"model": "m", "data": "d", **values})).spec


def problems(shape, data_ranks=1, **values):
    with pytest.raises(UserError) as error:
        make_plan(spec(**values), shape, layout=Layout(data_ranks))
    return error.value.problems


@pytest.mark.claim(
    "H27",
    command="fleetune train --global-batch-size 32 --micro-batch-size 4",
    seen="the global batch is the same for every micro-batch and every number of processes",
)
def test_two_of_the_three_batch_numbers_give_the_third(shape):
    def resolved(data_ranks, **values):
        plan = make_plan(spec(**values), shape, layout=Layout(data_ranks))
        batches = plan.batches
        return batches.global_batch_size, batches.micro_batch_size, batches.gradient_accumulation_steps

    assert resolved(2, global_batch_size=16, micro_batch_size=2) == (16, 2, 4)
    assert resolved(2, micro_batch_size=2, gradient_accumulation_steps=3) == (12, 2, 3)
    assert resolved(2, global_batch_size=16, gradient_accumulation_steps=4) == (16, 2, 4)
    assert resolved(1) == (8, 1, 8)
    assert resolved(1, sequence_length=128) == (8, 8, 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"micro_batch_size": 3}, "micro_batch_size 3 does not divide global_batch_size 8 (the default): give"),
        ({"global_batch_size": 9, "micro_batch_size": 2}, "micro_batch_size 2 does not divide global_batch_size 9: give"),
        ({"global_batch_size": 9, "gradient_accumulation_steps": 2}, "global_batch_size 9 does not divide by"),
        (
            {"global_batch_size": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 2},
            "global_batch_size 8 is not micro_batch_size 2",
        ),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_a_fix(values, says, shape):
    (problem,) = problems(shape, **values)
    assert problem.startswith(says) and "--" in problem


def test_processes_that_would_never_compute_are_refused(shape):
    (problem,) = problems(shape, data_ranks=4, global_batch_size=2)
    assert problem.startswith("4 processes share 2 micro-batches of 1 sequences in a step of 2, so 2 of them would never")
    assert "--gpus 2" in problem


def test_a_target_that_names_nothing_is_refused_with_the_nearest(shape):
    (problem,) = problems(shape, lora_targets="q_proj,k_prj")
    assert problem.startswith("lora_targets k_prj names no linear layer of the model's blocks: did you mean k_proj?")


def test_all_refusals_come_at_once(shape):
    assert len(problems(shape, lora_targets="nothing", micro_batch_size=3)) == 2


def test_a_sequence_longer_than_the_learned_positions_is_refused_and_a_rotary_one_is_noted(shape, tmp_path):
    import tiny

    gpt2 = read_shape(tiny.write_model(tmp_path / "gpt2", "gpt2"))
    (problem,) = problems(gpt2, sequence_length=512)
    assert "256 positions" in problem and "--sequence-length 256" in problem
    make_plan(spec(sequence_length=256), gpt2, layout=Layout(1))
    (note,) = make_plan(spec(sequence_length=512), shape, layout=Layout(1)).notes
    assert "longer than the 256 tokens" in note


def test_steps_are_known_from_max_steps_or_from_the_rows(shape):
    assert make_plan(spec(max_steps=7), shape, layout=Layout(1), num_sequences=1000).num_steps == 7
    assert make_plan(spec(epochs=2), shape, layout=Layout(1), num_sequences=10).num_steps == 3
    assert make_plan(spec(epochs=0.5), shape, layout=Layout(1), num_sequences=33).num_steps == 3
    assert make_plan(spec(), shape, layout=Layout(1)).num_steps is None


@pytest.mark.claim(
    "H4",
    command="fleetune plan",
    seen="bytes of parameters, gradients and optimizer of a rank are forecast",
)
@pytest.mark.claim(
    "X10",
    command="fleetune plan --model gpt_oss_120b",
    seen="bytes of a rank are known before anything loads",
)
@pytest.mark.claim(
    "X32",
    command="fleetune plan",
    seen="bytes by method and precision",
)
def test_bytes_of_a_rank_by_method_and_precision(shape):
    full = make_plan(spec(method="full"), shape, layout=Layout(2)).memory
    count = shape.num_parameters
    assert (full.frozen_bytes, full.trained_bytes, full.gradient_bytes, full.optimizer_bytes) == (
        0, 4 * count, 4 * count, 8 * count,
    )  # fmt: skip
    assert full.total_bytes == 16 * count
    half = make_plan(spec(precision="bf16"), shape, layout=Layout(2))
    assert half.memory.frozen_bytes == 2 * count
    assert half.memory.optimizer_bytes == 8 * half.trainable_parameters


def test_an_adapter_that_goes_on_counts_as_it_is(shape):
    from fleetune.spec.stored_tensor import StoredTensor

    adapter = {"a": StoredTensor((3, 5), "F32", 60), "b": StoredTensor((7, 3), "F32", 84)}
    assert make_plan(spec(lora_rank=64), shape, layout=Layout(1), adapter=adapter).trainable_parameters == 36


@pytest.mark.claim(
    "H40",
    command="fleetune plan",
    seen="the plan is told before the start",
)
def test_the_plan_is_json_and_is_explained_with_its_numbers(shape):
    plan = make_plan(spec(max_steps=7, global_batch_size=5, micro_batch_size=1), shape, layout=Layout(2))
    said = json.loads(json.dumps(plan.to_json()))
    assert (
        said["layout"] == {"replicate": 2, "shard": 1, "tensor": 1, "pipeline": 1}
        and said["shares"] == [3, 2]
        and said["gradient_accumulation_steps"] == 3
    )
    assert said["trainable_parameters"] == plan.trainable_parameters
    assert said["rank_memory"]["gradient_bytes"] == 4 * plan.trainable_parameters
    text = "\n".join(f"{what}: {value}" for what, value in explain(plan))
    assert f"{plan.trainable_parameters:,} parameters" in text
    assert "5 sequences = 5 micro-batches of 1, 3 + 2 on 2 processes" in text
    assert "steps: 7" in text and "at most" in text


def test_a_gguf_of_an_unknown_family_is_planned_without_names(tmp_path):
    import struct

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    numbers = {"embedding_length": 32, "block_count": 1, "attention.head_count": 4}
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("strange")]
    keys += [text(f"strange.{name}") + struct.pack("<II", 4, value) for name, value in numbers.items()]
    shapes = {"token_embd.weight": (32, 100), "blk.0.attn_q.weight": (32, 32), "blk.0.attn_norm.weight": (32,)}
    tensors = [
        text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", 0, 0)
        for name, dims in shapes.items()
    ]
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    path.write_bytes(head + b"".join(keys) + b"".join(tensors) + b"\0" * 20_000)
    shape = read_shape(path)
    assert shape.num_parameters == 3200 + 1024 + 32
    assert make_plan(spec(), shape, layout=Layout(1)).trainable_parameters == 8 * 64
    assert make_plan(spec(lora_targets="q_proj"), shape, layout=Layout(1)).trainable_parameters is None
    assert Path(path).exists()
