from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fleetune.spec.declared import declared
from fleetune.spec.errors import UserError
from fleetune.spec.given import arguments_given, environment_given, file_given, flags_given, preset_given
from fleetune.spec.read import read_run, resolve, write_run
from fleetune.spec.run_folder import RunFolder

ASKED = {"model": "m", "data": "d.jsonl"}


def problems_of(**sources):
    with pytest.raises(UserError) as error:
        resolve(**sources)
    return error.value.problems


def flags(**values):
    return flags_given({**ASKED, **values})


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.claim(
    "H21",
    command="fleetune train RUN.yaml --seed 1",
    seen="flag over environment over file over preset over default, each with its origin",
)
def test_a_flag_wins_over_environment_file_preset_and_default(tmp_path):
    file = file_given(write(tmp_path / "r.yaml", "seed: 3\nlora_rank: 3\nepochs: 3\nwarmup: 0.3\n"))
    resolved = resolve(
        flags=flags(seed="1"),
        environment=environment_given({"FLEETUNE_SEED": "2", "FLEETUNE_LORA_RANK": "2", "HOME": "/"}),
        file=file,
        preset=preset_given("small", {"seed": 4, "lora_rank": 4, "epochs": 4, "beta1": 0.4}),
    )
    flat = resolved.spec.flat()
    assert (flat["seed"], flat["lora_rank"], flat["epochs"], flat["warmup"], flat["beta1"], flat["beta2"]) == (
        1, 2, 3.0, 0.3, 0.4, 0.999,
    )  # fmt: skip
    assert resolved.origins["seed"] == "flag --seed"
    assert resolved.origins["lora_rank"] == "environment FLEETUNE_LORA_RANK"
    assert resolved.origins["epochs"] == f"file {tmp_path / 'r.yaml'}, line 3"
    assert resolved.origins["beta1"] == "preset small"
    assert resolved.origins["beta2"] == "default"
    assert set(resolved.origins) == set(declared())


@pytest.mark.parametrize("spelling", ["batch_size", "batch-size", "--per_device_train_batch_size", "micro-batch-size"])
def test_other_tools_names_hyphens_and_underscores_are_understood(spelling, tmp_path):
    assert resolve(flags=flags(**{spelling: "4"})).spec.optimization.micro_batch_size == 4
    plain = spelling.lstrip("-").replace("-", "_")
    file = file_given(write(tmp_path / "r.yaml", f"{plain}: 4\nmodel: m\ndata: [d]\n"))
    assert resolve(file=file).spec.optimization.micro_batch_size == 4
    environment = environment_given({f"FLEETUNE_{plain.upper()}": "4", "FLEETUNE_MODEL": "m", "FLEETUNE_DATA": "d"})
    assert resolve(environment=environment).spec.optimization.micro_batch_size == 4


def test_every_alias_leads_to_its_field_and_is_no_field_itself():
    seen: set[str] = set()
    for field in declared().values():
        assert not seen & {field.name, *field.aliases}
        seen |= {field.name, *field.aliases}


@pytest.mark.parametrize("name", ["sharding", "partition"])
def test_what_is_not_built_yet_is_unknown(name):
    (problem,) = problems_of(flags=flags(**{name: "1"}))
    assert problem.startswith(f"there is no flag --{name.replace('_', '-')}")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learnin_rate", "--learning-rate"),
        ("lr", "--learning-rate"),
        ("epoch", "--epochs"),
        ("output_dir", "--run"),
        ("rank", "--lora-rank"),
    ],
)
def test_an_unknown_flag_brings_the_one_that_was_meant(typed, meant):
    (problem,) = problems_of(flags=flags(**{typed: "1"}))
    assert problem == f"there is no flag --{typed.replace('_', '-')}: did you mean {meant}?"


def test_an_unknown_key_of_a_file_names_file_and_line(tmp_path):
    file = file_given(write(tmp_path / "r.yaml", "model: m\ndata: d\nlearnin_rate: 1\n"))
    (problem,) = problems_of(file=file)
    assert problem == (f"there is no setting learnin_rate (file {tmp_path / 'r.yaml'}, line 3): did you mean learning_rate?")


def test_an_unknown_variable_is_told_but_other_programs_variables_are_not():
    (problem,) = problems_of(flags=flags(), environment=environment_given({"FLEETUNE_SED": "1", "SED": "1"}))
    assert problem == "there is no setting FLEETUNE_SED: did you mean FLEETUNE_SEED?"
    resolve(flags=flags(), environment=environment_given({"FLEETUNE_CACHE": "/tmp/x", "FLEETUNE_SEED": ""}))


def test_all_problems_are_told_at_once(tmp_path):
    file = file_given(write(tmp_path / "r.yaml", "packing: maybe\nwarmup: 2\nnonsense: 1\n"))
    problems = problems_of(
        flags=flags_given({"lora_rank": "0", "method": "ful", "seed": "one"}),
        environment=environment_given({"FLEETUNE_EPOCHS": "inf"}),
        file=file,
    )
    where = f"file {tmp_path / 'r.yaml'}, line"
    assert set(problems) == {
        f"there is no setting nonsense ({where} 3): see fleetune train --help for all of them",
        "method 'ful' (flag --method) is not known: did you mean full? Give one of full, lora, qlora",
        "seed 'one' (flag --seed) is not a whole number: give a whole number, at least 0 and below 9223372036854775808",
        "epochs 'inf' (environment FLEETUNE_EPOCHS) is not finite: give a number, above 0",
        f"packing 'maybe' ({where} 1) is neither on nor off: give on or off",
        f"warmup 2 ({where} 2) is out of range: give a number, at least 0 and below 1",
        "lora_rank '0' (flag --lora-rank) is out of range: give a whole number, at least 1 and at most 4096",
        "no model is given: give --model with a preset (see fleetune presets), a hub id, a folder or a .gguf file",
        "no data is given: give --data with a file of rows (jsonl, json, csv, parquet, txt), a folder or a hub data set",
    }


#: field kind -> values that no field of that kind takes.
WRONG = {
    "text": [["a"], "a\0b", "a\nb", True],
    "choice": ["no such word", 3, ["a"]],
    "whole": ["x", "1.5", 1.5, True, [1], "1e400"],
    "number": ["x", "nan", "inf", True, [1.0], {}],
    "switch": ["maybe", 2, [True]],
    "words": [[1], {"a": 1}],
    "numbers": ["a,b", ["a"], [True], "1,nan"],
    "paths": [[1], {"a": 1}, [""], "a\0b", 3],
    "columns": ["prompt", "=x", "a=", ["a"], {"prompt": 3}],
}


@pytest.mark.parametrize("name", list(declared()))
def test_every_field_refuses_wrong_types_and_names_the_value_and_its_origin(name):
    field = declared()[name]
    for wrong in WRONG[field.kind]:
        problems = problems_of(flags=flags_given({**ASKED, name: wrong}))
        assert len(problems) == 1, (wrong, problems)
        assert problems[0].startswith(f"{field.shown} ")
        assert f"(flag --{name.replace('_', '-')})" in problems[0]
        assert f"ive {field.allowed()}" in problems[0]


@pytest.mark.parametrize("name", [name for name, field in declared().items() if field.limits])
def test_every_bound_is_kept(name):
    field = declared()[name]
    for part in field.limits.split(" and "):
        words, bound = part.rsplit(" ", 1)
        bound = float(bound)
        outside = {"at least": bound - 1, "above": bound, "at most": bound + 1, "below": bound}[words]
        (problem,) = problems_of(flags=flags_given({**ASKED, name: int(outside) if field.kind == "whole" else outside}))
        assert "is out of range" in problem and field.limits in problem


def test_numbers_may_be_written_as_a_person_writes_them(tmp_path):
    file = file_given(write(tmp_path / "r.yaml", "learning_rate: 1e-5\nmax_steps: 1e3\nwarmup: 0\nrevision: 0123\n"))
    flat = resolve(flags=flags(seed="1e3", epochs="2"), file=file).spec.flat()
    assert (flat["learning_rate"], flat["max_steps"], flat["warmup"], flat["seed"], flat["epochs"]) == (1e-5, 1000, 0, 1000, 2)
    assert flat["revision"] == "0123", "a commit that looks like a number stays as it is written"


@pytest.mark.parametrize(("text", "value"), [("on", True), ("no", False), ("0", False), ("TRUE", True)])
def test_switches_take_the_usual_words(text, value, tmp_path):
    assert resolve(flags=flags(), environment=environment_given({"FLEETUNE_PACKING": text})).spec.rows.packing is value
    file = file_given(write(tmp_path / "r.yaml", f"packing: {text}\n"))
    assert resolve(flags=flags(), file=file).spec.rows.packing is value


def test_lists_come_as_text_or_as_lists(tmp_path):
    text = "data: [a.jsonl, 'b,c.jsonl']\ndata_weights: [1, 0.5]\nlora_targets: [q_proj, v_proj]\ncolumns: {prompt: q}\n"
    rows = resolve(flags=flags_given({"model": "m"}), file=file_given(write(tmp_path / "r.yaml", text))).spec
    assert rows.rows.data == ("a.jsonl", "b,c.jsonl")
    assert rows.rows.data_weights == (1.0, 0.5)
    assert rows.adaptation.lora_targets == ("q_proj", "v_proj")
    other = resolve(flags=flags(lora_targets="q_proj, v_proj", data=["x", "y"], columns="prompt=q,response=a")).spec
    assert other.adaptation.lora_targets == ("q_proj", "v_proj")
    assert other.rows.data == ("x", "y") and other.rows.columns == {"prompt": "q", "response": "a"}


def test_paths_may_be_path_objects():
    assert resolve(flags=arguments_given({"model": Path("m"), "data": Path("d")})).spec.rows.data == ("d",)


def test_fields_that_contradict_each_other_are_told():
    problems = problems_of(flags=flags(data_weights="1,2", validation="v", validation_share="0.1"))
    assert len(problems) == 2 and "data_weights has 2 numbers" in problems[0] and "validation_share" in problems[1]


def test_two_names_of_one_field_in_one_place_are_refused_when_they_differ():
    (problem,) = problems_of(flags=flags_given({**ASKED, "batch_size": "2", "micro_batch_size": "4"}))
    assert "two names of one thing" in problem
    resolve(flags=flags_given({**ASKED, "batch_size": "2", "micro_batch_size": "2"}))


def test_an_explicit_nothing_overrides_a_preset(tmp_path):
    file = file_given(write(tmp_path / "r.yaml", "max_steps: null\n"))
    assert resolve(flags=flags(), file=file, preset=preset_given("p", {"max_steps": 9})).spec.optimization.max_steps is None
    (problem,) = problems_of(flags=flags(), file=file_given(write(tmp_path / "s.yaml", "packing: ~\n")))
    assert problem.startswith("packing (nothing)")


def test_a_section_in_a_file_is_explained(tmp_path):
    (problem,) = problems_of(flags=flags(), file=file_given(write(tmp_path / "r.yaml", "optimization:\n  seed: 1\n")))
    assert "is a section, and settings are written flat" in problem


def test_a_run_is_read_back_as_it_was_written_and_only_its_owner_reads_it(tmp_path):
    resolved = resolve(
        flags=flags(model="on", data=["1e-5", "ä b.jsonl", "x: y"], revision="1234567", learning_rate="1e-5", resume=True),
        preset=preset_given("p", {"columns": {"prompt": "q"}, "lora_targets": ["a", "b"]}),
    )
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_run(folder, resolved)
    assert read_run(folder) == resolved
    assert stat.S_IMODE(folder.spec.stat().st_mode) == 0o600
    assert [path.name for path in folder.path.iterdir() if path.is_file()] == ["run.yaml"]


def test_a_run_yaml_is_a_file_to_start_from_without_what_belongs_to_one_start(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_run(folder, resolve(flags=flags(seed="7", resume=True, json_output=True, run=str(folder.path))))
    again = resolve(flags=flags_given({"lora_rank": "4"}), file=file_given(folder.spec)).spec
    assert (again.optimization.seed, again.adaptation.lora_rank, again.weights.model) == (7, 4, "m")
    assert again.output.run == str(folder.path)
    assert not again.output.resume and not again.output.json_output


def test_a_run_of_another_version_and_a_damaged_run_are_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with pytest.raises(UserError, match="does not exist"):
        read_run(folder)
    folder.spec.write_text("version: 99\nvalues: {}\norigins: {}\n")
    with pytest.raises(UserError, match="version 99"):
        read_run(folder)
    folder.spec.write_text("model: m\n")
    with pytest.raises(UserError, match=r"no run\.yaml"):
        read_run(folder)


PRESET = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "warmup_steps": 50}


def test_a_preset_leaves_to_a_person_what_they_say_in_other_words():
    def division(**given):
        got = resolve(flags=flags(**given), preset=preset_given("p", PRESET)).spec.optimization
        return got.global_batch_size, got.micro_batch_size, got.gradient_accumulation_steps

    assert division() == (None, 2, 4)
    assert division(micro_batch_size="8") == (None, 8, 4)
    assert division(global_batch_size="16") == (16, 2, None)
    assert division(global_batch_size="16", gradient_accumulation_steps="2") == (16, None, 2)
    resolved = resolve(flags=flags(warmup="0.1"), preset=preset_given("p", PRESET))
    assert (resolved.spec.optimization.warmup, resolved.spec.optimization.warmup_steps) == (0.1, None)
    assert resolve(flags=flags(), preset=preset_given("p", PRESET)).origins["warmup_steps"] == "preset p"


def test_a_preset_that_asks_for_what_is_not_there_is_told_by_name():
    assert problems_of(flags=flags(), preset=preset_given("p", {"teleport": "far"})) == (
        "preset p asks for teleport 'far', which this fleetune cannot do: take another",
    )


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [("2:4", 2, 4), ("4", None, 4), (4, None, 4), ("3:3", 3, 3)],
    ids=["range", "text", "number", "equal"],
)
def test_a_range_of_processes_is_two_fields(given: object, least: int | None, most: int) -> None:
    spec = resolve(flags=flags_given({"num_gpus": given}), required=()).spec
    assert (spec.layout.min_gpus, spec.layout.gpus) == (least, most)


def test_a_plain_number_of_processes_ends_a_range_that_was_given_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("gpus: 2:4\n")
    sources = {"file": file_given(file), "required": ()}
    assert resolve(**sources).spec.layout.min_gpus == 2
    narrowed = resolve(flags=flags_given({"gpus": "3"}), **sources).spec.layout
    assert (narrowed.gpus, narrowed.min_gpus) == (3, None)


@pytest.mark.parametrize("given", ["4:2", "a:b", "2:", ":3", "0:2"])
def test_a_range_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="gpus"):
        resolve(flags=flags_given({"gpus": given}), required=())
