from __future__ import annotations

import pytest

from fleetune.spec.declared import declared
from fleetune.spec.errors import UserError
from fleetune.spec.given import flags_given
from fleetune.spec.read import resolve
from fleetune.spec.resume import check_resume

START = {"model": "m", "data": "d.jsonl", "learning_rate": "1e-3", "max_steps": "10"}

#: A value other than the default, for every field.
CHANGED = {
    "text": "other",
    "whole": "9",
    "number": "0.5",
    "words": "q_proj",
    "numbers": "2",
    "paths": "other.jsonl",
    "columns": "prompt=q",
}


def changed(field):
    if field.kind == "switch":
        return not field.default
    if field.kind == "choice":
        return next((choice for choice in field.choices if choice != field.default), None)
    return "1" if field.name == "zero_stage" else CHANGED[field.kind]


def test_what_is_not_given_again_stays_as_it_was():
    old = resolve(flags=flags_given(START))
    new = resolve(flags=flags_given({"resume": True, "gpus": "2"}), earlier=old.source())
    assert new.spec.optimization.learning_rate == 1e-3
    assert new.origins["learning_rate"] == "earlier flag --learning-rate"
    assert resolve(earlier=new.source()).origins["learning_rate"] == "earlier flag --learning-rate"
    assert new.spec.layout.gpus == 2 and new.spec.output.resume
    assert check_resume(old, new) == ()


@pytest.mark.parametrize("name", [name for name in declared() if name != "run"])
def test_each_field_may_change_on_resume_exactly_when_it_says_so(name):
    field = declared()[name]
    value = changed(field)
    if value is None:
        pytest.skip(f"{name} has one choice only")
    old = resolve(flags=flags_given(START))
    new = resolve(flags=flags_given({**START, name: value}))
    assert old.spec.flat()[name] != new.spec.flat()[name]
    if field.resume:
        check_resume(old, new)
    else:
        with pytest.raises(UserError) as error:
            check_resume(old, new)
        (problem,) = error.value.problems
        assert problem.startswith(f"{field.shown} was ") and f"(flag --{name.replace('_', '-')})" in problem


def test_all_refused_changes_are_told_at_once_with_both_values():
    old = resolve(flags=flags_given(START))
    new = resolve(flags=flags_given({**START, "seed": "5", "learning_rate": "2e-3"}))
    with pytest.raises(UserError) as error:
        check_resume(old, new)
    assert error.value.problems == (
        "learning_rate was 0.001 (flag --learning-rate) when the run began, and is now 0.002 (flag --learning-rate): leave it "
        "as it was, or begin a new run with another --run",
        "seed was 0 (default) when the run began, and is now 5 (flag --seed): leave it as it was, or begin a new run with "
        "another --run",
    )


def test_one_file_written_as_two_paths_is_no_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = resolve(flags=flags_given({**START, "data": str(tmp_path / "d.jsonl")}))
    assert check_resume(old, resolve(flags=flags_given(START))) == ()


def test_more_epochs_behind_an_old_max_steps_are_not_silent():
    old = resolve(flags=flags_given(START))
    (note,) = check_resume(old, resolve(flags=flags_given({**START, "epochs": "3"})))
    assert "still ends after step 10" in note
