from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from fleetune.parallel.native import NativeEngine, StepSettings
from fleetune.parallel.out_of_memory import OutOfMemory
from fleetune.parallel.world import Place, World
from fleetune.spec.records import MicroBatch
from parallel import cases, toy
from parallel.ranks import Ranks


def alone() -> World:
    return World(Place(), torch.device("cpu"))


def reference(num_steps: int, clip: float) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Plain torch: one mean loss over the whole global batch, torch's own clipping and AdamW."""
    model = toy.Toy()
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=0.01, weight_decay=0.01)
    rows = []
    for step in range(num_steps):
        optimizer.zero_grad()
        parts = [model.forward(batch) for batch in toy.global_batch(step)]
        loss = sum(part for part, _ in parts) / sum(weight for _, weight in parts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.module.parameters(), clip if clip else math.inf)
        optimizer.step()
        rows.append((loss.item(), norm.item()))
    return rows, dict(model.module.state_dict())


@pytest.mark.claim(
    "X6",
    command="fleetune train",
    seen="our own trainer agrees with plain torch",
)
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_one_process_trains_as_plain_torch_does(clip: float) -> None:
    expected, weights = reference(6, clip)
    engine = toy.build(alone(), clip=clip)
    rows = toy.train(engine, toy.global_batch, range(6))
    for (loss, norm, _, _), (expected_loss, expected_norm) in zip(rows, expected):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        assert clip == 0 or norm > clip, "the clip never acts: the test shows nothing"
    for name, tensor in engine.full_tensors():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)


def test_counts_are_those_of_the_whole_global_batch() -> None:
    report = toy.build(alone()).step(toy.global_batch(0), 0.01)
    assert (report.trained_tokens, report.tokens) == (1 + 60 + 3 + 33, 4 + 80 + 9 + 40 + 70)


@pytest.mark.claim(
    "H37",
    command="fleetune train --gpus 4",
    seen="losses of 2 and 4 processes are those of one",
)
@pytest.mark.claim(
    "X2",
    command="fleetune train --gpus 2",
    seen="each rank reads its share; losses are those of one process",
)
@pytest.mark.claim(
    "X43",
    command="fleetune train --gpus 1; --gpus 2; --gpus 4",
    seen="the same losses on 1, 2 and 4 processes",
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_several_processes_have_the_losses_of_one(ranks: Ranks, world_size: int) -> None:
    one = ranks.run(cases.losses, 1, 10)[0]
    several = ranks.run(cases.losses, world_size, 10)
    assert len({answer["fingerprint"] for answer in several}) == 1, "the ranks' weights have drifted apart"
    for answer in several:
        assert answer["rows"] == several[0]["rows"]
        for step, (row, expected) in enumerate(zip(answer["rows"], one["rows"])):
            tolerance = 1e-6 if step == 0 else 1e-5
            assert row[0] == pytest.approx(expected[0], rel=tolerance)
            assert row[1] == pytest.approx(expected[1], rel=1e-4)
            assert row[2:] == expected[2:]
    np.testing.assert_allclose(several[0]["parameters"][0], one["parameters"][0], rtol=1e-3, atol=1e-5)


def test_a_mean_of_means_would_be_seen() -> None:
    """The batches of these tests tell the right loss from the mean over micro-batches, or over ranks, of their means."""
    model = toy.Toy()
    parts = [model.forward(batch) for batch in toy.global_batch(0)]
    right = sum(loss for loss, _ in parts).item() / sum(weight for _, weight in parts)
    means = [loss.item() / weight for loss, weight in parts if weight]
    by_rank = [sum(loss.item() for loss, _ in half) / sum(weight for _, weight in half) for half in (parts[:3], parts[3:])]
    assert abs(sum(means) / len(means) - right) > 1e-2
    assert abs(sum(by_rank) / 2 - right) > 1e-3


@pytest.mark.claim(
    "H34",
    command="fleetune train --gpus 3 --global-batch-size 4",
    seen="unequal shares of a step have the losses of one process",
)
def test_a_rank_with_an_empty_share_changes_nothing(ranks: Ranks) -> None:
    one = ranks.run(cases.all_on_rank_0, 1, 4)[0]
    two = ranks.run(cases.all_on_rank_0, 2, 4)
    assert two[0] == two[1]
    for row, expected in zip(two[0], one):
        assert row == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_world_gives_the_same_bits_again(ranks: Ranks, world_size: int) -> None:
    first, second = ranks.run(cases.losses, world_size, 5), ranks.run(cases.losses, world_size, 5)
    assert first == second


def test_the_division_into_micro_batches_changes_only_rounding() -> None:
    whole = merged(toy.global_batch(0))
    parts = toy.build(alone()).step(toy.global_batch(0), 0.01)
    single = toy.build(alone()).step([whole], 0.01)
    assert single.loss == pytest.approx(parts.loss, rel=1e-6)
    assert single.gradient_norm == pytest.approx(parts.gradient_norm, rel=1e-5)


def merged(batches: list[MicroBatch]) -> MicroBatch:
    lengths = [batch.num_tokens for batch in batches]
    return MicroBatch(
        step=0,
        number=0,
        sequences=tuple(itertools.chain.from_iterable(batch.sequences for batch in batches)),
        tokens=np.concatenate([batch.tokens for batch in batches]),
        trained=np.concatenate([batch.trained for batch in batches]),
        document_bounds=np.cumsum([0, *lengths]),
        sequence_bounds=np.arange(len(batches) + 1),
        samples=tuple(itertools.chain.from_iterable(batch.samples for batch in batches)),
    )


@pytest.mark.claim(
    "X27",
    command="fleetune train --gpus 2",
    seen="bytes on the wire are in every step's record",
)
@pytest.mark.claim(
    "X29",
    command="fleetune train --gradient-accumulation-steps 8",
    seen="the bytes of a step are those of one all-reduce, whatever the accumulation",
)
@pytest.mark.claim(
    "X40",
    command="fleetune train --gradient-accumulation-steps 8",
    seen="accumulation is free of traffic",
)
def test_accumulation_costs_no_traffic(ranks: Ranks) -> None:
    one, eight = ranks.run(cases.traffic, 2, 1), ranks.run(cases.traffic, 2, 8)
    assert one == eight
    parameters = sum(parameter.numel() for _, parameter in toy.Toy().trained())
    assert parameters * 4 <= one[0] <= parameters * 4 + 20_000


def test_a_world_of_one_sends_nothing() -> None:
    assert toy.build(alone()).step(toy.global_batch(0), 0.01).bytes_sent == 0


@pytest.mark.claim(
    "X46",
    command="fleetune train --validation held_out.jsonl --evaluate-every 5 --gpus 2",
    seen="a loss weighted by tokens over all ranks",
)
def test_evaluation_sums_unequal_shares_and_changes_nothing(ranks: Ranks) -> None:
    for answer in ranks.run(cases.evaluation, 3):
        assert answer["together"][0] == pytest.approx(answer["single"][0], rel=1e-6)
        assert answer["together"][1] == answer["single"][1] > 97
        assert answer["nothing"] == [0.0, 0]
        assert answer["same"]


def test_dropout_is_on_in_a_step_and_off_in_evaluation() -> None:
    model = toy.Toy()
    engine = toy.build(alone(), model=model)
    engine.evaluate(toy.global_batch(0))
    engine.step(toy.global_batch(0), 0.01)
    assert model.modes == [False, True]


def test_a_rehearsal_runs_forward_and_backward_and_leaves_no_trace() -> None:
    model = toy.Toy()
    rehearsed, plain = toy.build(alone(), model=model), toy.build(alone())
    before = rehearsed.fingerprint()
    assert rehearsed.rehearse(toy.global_batch(7)) is True
    assert model.modes == [True] and rehearsed.fingerprint() == before
    assert toy.train(rehearsed, toy.global_batch, range(2)) == toy.train(plain, toy.global_batch, range(2))


def test_a_rehearsal_that_does_not_fit_leaves_no_trace_either() -> None:
    class Full(toy.Toy):
        def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, int]:
            if batch.step == 7 and batch.number == 3:
                raise MemoryError("no room")
            return super().forward(batch)

    rehearsed, plain = toy.build(alone(), model=Full()), toy.build(alone())
    with pytest.raises(OutOfMemory, match="MemoryError: no room"):
        rehearsed.rehearse(toy.global_batch(7))
    assert toy.train(rehearsed, toy.global_batch, range(2)) == toy.train(plain, toy.global_batch, range(2))


def test_a_step_without_trained_tokens_is_an_error_that_names_the_samples(ranks: Ranks) -> None:
    for text in ranks.run(cases.nothing_trained, 2):
        assert "rows:700" in text and "rows:701" in text and "2 samples" in text


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_value_that_is_not_finite_on_one_rank_stops_the_update_on_all(ranks: Ranks, world_size: int) -> None:
    for answer in ranks.run(cases.one_rank_is_not_finite, world_size):
        assert answer["applied"] == [True, False, True]
        assert answer["loss"] in ("inf", "nan")
        assert answer["unchanged"]
        assert answer["as_if_it_had_not_been"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loading_restores_everything_to_the_last_bit(ranks: Ranks, world_size: int) -> None:
    answers = ranks.run(cases.save_poison_load, world_size)
    written = [key for answer in answers for key in answer["shards"]]
    assert sorted(written) == answers[0]["all"], "a tensor was written twice, or by nobody"
    assert all(len(answer["shards"]) > 0 for answer in answers)
    for answer in answers:
        assert answer["resumed"] == answer["straight"]
        assert answer["equal"]
    roles = {key.rpartition("/")[2] for key in written}
    assert roles == {"parameter", "exp_avg", "exp_avg_sq", "step"}


def test_a_checkpoint_taken_before_the_first_step_is_whole() -> None:
    engine = toy.build(alone())
    stored = {(shard.name, shard.role): shard.tensor.clone() for shard in engine.shards()}
    straight = toy.train(engine, toy.global_batch, range(2))
    fresh = toy.build(alone(), model=toy.Toy(seed=5))
    fresh.load(lambda name, role, offset, shape: stored[name, role])
    assert toy.train(fresh, toy.global_batch, range(2)) == straight


def test_a_tensor_that_the_checkpoint_lacks_is_an_error() -> None:
    engine = toy.build(alone())
    stored = {(shard.name, shard.role): shard.tensor.clone() for shard in engine.shards() if shard.role != "exp_avg_sq"}
    with pytest.raises(KeyError):
        engine.load(lambda name, role, offset, shape: stored[name, role])


def test_the_state_of_the_optimizer_made_ahead_changes_no_number() -> None:
    _, weights = reference(3, 0.0)
    engine = toy.build(alone(), clip=0.0)
    toy.train(engine, toy.global_batch, range(3))
    for name, tensor in engine.full_tensors():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-6, atol=1e-7)


def test_an_optimizer_whose_state_does_not_begin_as_zeros_is_refused() -> None:
    def rprop(named: Any) -> torch.optim.Optimizer:
        return torch.optim.Rprop([parameter for _, parameter in named], lr=0.1)

    model = toy.Toy()
    with pytest.raises(TypeError, match="Rprop"):
        NativeEngine(model, model.forward, world=alone(), optimizer=rprop, settings=StepSettings())


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_scales_its_loss_and_keeps_the_scale_in_the_checkpoint(ranks: Ranks, world_size: int) -> None:
    for answer in ranks.run(cases.save_poison_load, world_size, "fp16"):
        assert all(math.isfinite(norm) for _, norm, _, _ in answer["straight"]), "no step was made: the test shows nothing"
        assert answer["resumed"] == answer["straight"]
        assert "loss_scale/engine" in answer["all"]


def test_an_overflow_of_the_scaled_loss_lowers_the_scale_until_training_goes_on() -> None:
    """The loss is multiplied so that gradients overflow fp16 at first; the reported norm is never the scaled one."""
    engine = toy.build(alone(), model=toy.Toy(dtype=torch.float16, gain=3000.0), clip=0.0, precision="fp16")
    reports = [engine.step(toy.global_batch(0), 0.001) for _ in range(20)]
    applied = [report.applied for report in reports]
    assert not applied[0] and applied[-1] and all(math.isfinite(report.loss) for report in reports)
    assert applied == sorted(applied), "it went on and off again"
    first = reports[applied.index(True)]
    exact = toy.build(alone(), clip=0.0).step(toy.global_batch(0), 0.001)
    assert first.gradient_norm == pytest.approx(3000 * exact.gradient_norm, rel=0.05)


def test_trained_parameters_in_another_dtype_are_refused_by_name() -> None:
    model = toy.Toy()
    model.module[0].to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"0\.weight is torch\.bfloat16"):
        toy.build(alone(), model=model)


def test_a_parameter_given_under_two_names_is_refused() -> None:
    model = toy.Toy()
    named = list(model.trained())
    model.trained = lambda: iter([*named, ("again", named[0][1])])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"0\.weight and again are one parameter"):
        toy.build(alone(), model=model)


def test_a_gradient_that_somebody_replaced_is_noticed() -> None:
    model = toy.Toy()
    engine = toy.build(alone(), model=model)
    model.module.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="the gradient of"):
        engine.step(toy.global_batch(0), 0.01)


def test_an_objective_that_weighs_otherwise_is_noticed() -> None:
    model = toy.Toy()
    engine = NativeEngine(
        model,
        lambda batch: (model.forward(batch)[0], 1),
        world=alone(),
        optimizer=toy.adamw,
        settings=StepSettings(),
    )
    with pytest.raises(RuntimeError, match="weight 1"):
        engine.step(toy.global_batch(0)[1:], 0.01)


def test_the_fingerprint_changes_with_one_bit() -> None:
    model = toy.Toy()
    engine = toy.build(alone(), model=model)
    before = engine.fingerprint()
    assert toy.build(alone()).fingerprint() == before
    with torch.no_grad():
        model.module[3].bias.view(torch.int32)[0] ^= 1
    assert engine.fingerprint() != before


def test_the_loss_of_many_ranks_is_summed_as_in_double_precision() -> None:
    """The sum over 64 ranks of parts of a loss near 12, in the fp32 buffer that travels."""
    from fleetune.parallel.gradients import FlatGradients

    random = np.random.default_rng(0)
    parts = random.dirichlet(np.ones(64)) * 11.987654321
    total = None
    for part in parts:
        gradients = FlatGradients([("p", torch.nn.Parameter(torch.zeros(5)))])
        gradients.put_loss(torch.tensor(part, dtype=torch.float64))
        total = gradients.buffer.clone() if total is None else total + gradients.buffer
    gradients.buffer.copy_(total)
    assert gradients.loss_and_norm()[0] == pytest.approx(11.987654321, abs=1e-9)
    assert abs(float(np.sum(parts.astype(np.float32), dtype=np.float32)) - 11.987654321) > 1e-8


def test_a_closed_engine_gives_the_parameters_back() -> None:
    model = toy.Toy()
    engine = toy.build(alone(), model=model)
    engine.step(toy.global_batch(0), 0.01)
    engine.close()
    assert all(parameter.grad is None for _, parameter in model.trained())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_trains_as_the_cpu_does() -> None:
    expected = toy.train(toy.build(alone()), toy.global_batch, range(5))
    engine = toy.build(World(Place(), torch.device("cuda", 0)))
    for row, wanted in zip(toy.train(engine, toy.global_batch, range(5)), expected):
        assert row == pytest.approx(wanted, rel=1e-4)
    stored = {(shard.name, shard.role): shard.tensor.cpu().clone() for shard in engine.shards()}
    straight = toy.train(engine, toy.global_batch, range(5, 8))
    fresh = toy.build(World(Place(), torch.device("cuda", 0)), model=toy.Toy(seed=3, device="cuda"))
    fresh.load(lambda name, role, offset, shape: stored[name, role])
    assert toy.train(fresh, toy.global_batch, range(5, 8)) == straight
    assert fresh.fingerprint() == engine.fingerprint()


def test_a_real_adapter_trains_the_same_on_two_processes(ranks: Ranks, tiny_llama: Any) -> None:
    one = ranks.run(cases.real_losses, 1, str(tiny_llama))[0]
    two = ranks.run(cases.real_losses, 2, str(tiny_llama))
    assert two[0]["fingerprint"] == two[1]["fingerprint"]
    assert one["rows"][-1][0] < one["rows"][0][0]
    for row, expected in zip(two[0]["rows"], one["rows"]):
        assert row == pytest.approx(expected, rel=2e-5)
