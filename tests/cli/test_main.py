from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from fleetune.cli.main import COMMANDS, main
from fleetune.spec.declared import declared

HEAVY = ("torch", "transformers", "peft", "datasets", "numpy", "pyarrow", "rich", "jinja2", "tokenizers", "huggingface_hub")


def loaded_by(words: list[str]) -> set[str]:
    """Top-level packages (and rooms) that a command line imports, in a process of its own."""
    script = (
        "import sys\nfrom fleetune.cli.main import main\ncode = main(sys.argv[1:])\n"
        "names = {'.'.join(name.split('.')[: 2 if name.startswith('fleetune') else 1]) for name in sys.modules}\n"
        "print('LOADED', *sorted(names))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_help_comes_from_a_table_and_imports_no_library_and_no_room():
    loaded = loaded_by(["--help"])
    assert not loaded & {"click", "pydantic", "yaml", *HEAVY}
    assert {name for name in loaded if name.startswith("fleetune.")} == {"fleetune.cli"}


def test_help_of_train_imports_nothing_that_computes():
    loaded = loaded_by(["train", "--help"])
    assert not loaded & set(HEAVY)
    assert "fleetune.training" not in loaded


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_table_is_there_and_has_help(command, capsys):
    assert importlib.import_module(f"fleetune.cli.{command}").run(["--help"]) == 0
    assert f"fleetune {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_has_every_field_with_its_description_default_and_choices(command, capsys):
    main([command, "--help"])
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for field in declared().values():
        assert f"{field.flag} " in words
        first = field.description.split(". ")[0].split()[:4]
        # Long words are broken to fit the terminal, and a hyphen is a place to break: what is compared has no spaces.
        assert "".join(first) in words.replace(" ", "")
        if field.choices:
            assert f"{field.flag} {'|'.join(field.choices)}" in words
        if field.kind == "switch":
            assert f"--no-{field.flag[2:]}" in words
    assert "--batch-size" not in text, "other tools' names are taken, and not shown"
    assert "[at least 8; default: 1024]" in words


def test_version_is_that_of_the_package(capsys):
    from importlib import metadata

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["fleetune", metadata.version("fleetune")]


def test_no_command_shows_the_table_and_an_unknown_one_the_nearest(capsys):
    assert main([]) == 2
    assert "usage: fleetune COMMAND" in capsys.readouterr().out
    assert main(["trian", "--model", "x"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'trian': did you mean fleetune train?\n"


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["presets", "--json"]])
def test_a_reader_that_has_left_is_no_error(words):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "fleetune.cli.main", *words]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
