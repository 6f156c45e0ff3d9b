from __future__ import annotations

import pytest

from fleetune.cli.evaluate import flags as evaluate_flags
from fleetune.cli.generate import flags as generate_flags
from fleetune.cli.train import flags as train_flags
from fleetune.spec.declared import declared
from fleetune.spec.errors import UserError
from fleetune.spec.read import resolve


@pytest.mark.parametrize(
    "words",
    [
        ["--learning-rate", "2e-5"],
        ["--learning_rate", "2e-5"],
        ["--learning_rate=2e-5"],
        ["--learning-rate", "1", "--learning_rate=2e-5"],
    ],
)
def test_a_flag_may_be_written_in_the_usual_ways_and_the_last_wins(words):
    assert train_flags().read(words).fields == {"learning_rate": "2e-5"}


@pytest.mark.parametrize("name", list(declared()))
def test_every_field_has_a_flag_that_reaches_it_under_all_its_names(name):
    field = declared()[name]
    value = {"switch": [], "columns": ["prompt=a"], "paths": ["a"]}.get(field.kind, ["1"])
    for spelling in (field.flag[2:], name, *field.aliases):
        typed = train_flags().read([f"--{spelling}", *value])
        assert list(typed.fields) == [name]
        if field.kind == "switch":
            assert typed.fields[name] is True
            assert train_flags().read([f"--no-{spelling}"]).fields[name] is False


def test_only_data_and_validation_may_be_repeated():
    typed = train_flags().read(["--data", "a", "--dataset", "b,c", "--validation", "d", "--validation", "e"])
    assert typed.fields == {"data": ("a", "b,c"), "validation": ("d", "e")}


def test_words_without_dashes_are_positional_also_between_flags():
    typed = train_flags().read(["run.yaml", "--seed", "1"])
    assert typed.words == ["run.yaml"] == train_flags().read(["--seed", "1", "run.yaml"]).words
    assert generate_flags().read(["model", "--", "--not-a-flag"]).words == ["model", "--not-a-flag"]


def test_unknown_flags_are_told_together_with_wrong_values():
    typed = train_flags().read(["--learnin-rate", "3", "--use_deepsped", "--qlora", "--lora-rank", "0"])
    with pytest.raises(UserError) as error:
        resolve(flags=typed.source(), required=())
    assert len(error.value.problems) == 4
    assert error.value.problems[0] == "there is no flag --learnin-rate: did you mean --learning-rate?"


def test_unknown_flags_of_a_command_with_few_are_told_with_its_own_nearest():
    with pytest.raises(UserError) as error:
        evaluate_flags().read(["m", "--max-row", "3", "--learning-rate", "1"])
    assert error.value.problems == (
        "there is no flag --max-row: did you mean --max-rows?",
        "fleetune evaluate has no flag --learning-rate: see fleetune evaluate --help for all of them",
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--packing=false"], "--packing takes no value: write --packing or --no-packing"),
        (["--seed"], "--seed needs a value: give a whole number"),
        (["--data"], "--data needs a value: give a file, a folder or a hub id"),
    ],
)
def test_a_flag_without_its_value_or_with_one_too_many_is_explained(words, says):
    with pytest.raises(UserError) as error:
        train_flags().read(words)
    assert str(error.value).startswith(says)


def test_the_values_of_a_commands_own_flags_are_checked():
    with pytest.raises(UserError, match="max-rows"):
        evaluate_flags().read(["m", "--max-rows", "0"])
    assert evaluate_flags().read(["m", "--max-rows", "3"]).own["max_rows"] == 3
