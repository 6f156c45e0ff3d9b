from __future__ import annotations

import pytest

from fleetune.spec.agreement import against_adapter, optimizer_elsewhere, without_effect
from fleetune.spec.given import Source, arguments_given, flags_given, preset_given
from fleetune.spec.read import resolve

ASKED = {"model": "m", "data": "d"}


def flags(**values):
    return resolve(flags=flags_given({**ASKED, **values}))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"exact_match": True}, "exact_match on"),
        ({"evaluate_every": 5}, "evaluate_every 5"),
        ({"validation": "v", "early_stop": 2}, "early_stop 2"),
        ({"method": "full", "lora_rank": 4}, "lora_rank 4"),
        ({"method": "full", "lora_targets": "q_proj,v_proj"}, "lora_targets q_proj,v_proj"),
        ({"max_new_tokens": 9}, "max_new_tokens 9"),
        ({"schedule": "constant", "final_learning_rate_share": 0.5}, "final_learning_rate_share 0.5"),
        ({"accumulate": "once"}, "accumulate once"),
        ({"skip_window": 2}, "skip_window 2"),
        ({"ssh_config": "own"}, "ssh_config own"),
    ],
)
def test_what_could_have_no_effect_is_refused_by_name_with_a_fix(values, name):
    (problem,) = without_effect(flags(**values))
    assert problem.startswith(f"{name} (flag --") and ("give --" in problem or "leave it out" in problem)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"validation": "v", "exact_match": True, "max_new_tokens": 9, "evaluate_every": 5, "early_stop": 2},
        {"validation_share": 0.1, "evaluate_every": 5},
        {"method": "full"},
        {"lora_rank": 4},
        {"schedule": "constant"},
        {"accumulate": "once", "shard": 2},
        {"accumulate": "once", "zero_stage": 2},
        {"skip_window": 2, "on_spike": "rewind"},
        {"skip_window": 2, "on_nonfinite": "rewind"},
        {"ssh_config": "own", "hosts": "a,b"},
    ],
)
def test_what_has_an_effect_is_not(values):
    assert without_effect(flags(**values)) == []


def test_a_file_may_hold_what_suits_another_method():
    file = Source("file", {"lora_rank": 4}, name="run.yaml")
    assert without_effect(resolve(flags=flags_given({**ASKED, "method": "full"}), file=file)) == []
    assert without_effect(resolve(flags=arguments_given({**ASKED, "method": "full", "lora_rank": 4})))


def test_an_adapter_that_goes_on_keeps_its_own_shape():
    config = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "use_dora": False, "use_rslora": False}
    assert against_adapter(flags(), config) == []
    assert against_adapter(flags(lora_rank=8, lora_alpha=16, adapter="lora"), config) == []
    problems = against_adapter(flags(lora_rank=4, adapter="dora", lora_targets="q_proj"), config)
    assert [problem.split(" (")[0] for problem in problems] == ["adapter dora", "lora_rank 4", "lora_targets q_proj"]
    assert "differs from the 8 of the adapter" in problems[1]


def test_what_an_earlier_start_was_given_is_not_held_against_this_one():
    earlier = flags(validation="v", exact_match=True, max_new_tokens=9).source()
    assert without_effect(resolve(flags=flags_given({"exact_match": False}), earlier=earlier)) == []


def test_an_optimizer_on_the_cpu_beside_a_model_on_a_gpu_is_refused():
    resolved = resolve(flags=flags_given({"model": "m", "data": "d", "optimizer": "cpu_adam"}))
    assert optimizer_elsewhere(resolved, "cpu") == []
    assert "give --optimizer adamw" in optimizer_elsewhere(resolved, "cuda")[0]


def test_two_words_for_the_warmup_are_refused_and_a_presets_evaluations_wait_for_rows():
    both = resolve(flags=flags_given({"model": "m", "data": "d", "warmup": "0.1", "warmup_steps": "3"}))
    assert "both say how long" in without_effect(both)[0]
    preset = preset_given("p", {"evaluate_every": 5000})
    assert without_effect(resolve(flags=flags_given({"model": "m", "data": "d"}), preset=preset)) == []
