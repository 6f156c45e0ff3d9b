"""The house rules hold for every file. The list of exceptions is empty."""

from __future__ import annotations

import subprocess
import sys

import pytest

from house import rules

SOURCES = rules.package_sources()


@pytest.mark.parametrize(
    "rule",
    [
        rules.breaches_of_floors,
        rules.breaches_of_weight,
        rules.breaches_of_safety,
        rules.breaches_of_names,
        rules.breaches_of_size,
        rules.breaches_of_promises,
    ],
    ids=lambda rule: rule.__name__,
)
def test_a_rule_holds_in_every_file(rule):
    assert [breach for source in SOURCES for breach in rule(source)] == []


def test_every_room_is_there_and_says_what_it_is():
    for room in rules.FLOORS:
        text = (rules.PACKAGE / room / "__init__.py").read_text()
        assert text.startswith('"""'), f"{room}/__init__.py has no docstring"


def test_every_file_says_what_it_is():
    import ast

    assert [source.name for source in SOURCES if not ast.get_docstring(source.tree)] == []


def test_tests_use_no_mocks_and_none_is_switched_off():
    files = sorted((rules.ROOT / "tests").rglob("*.py"))
    assert [breach for file in files for breach in rules.breaches_of_tests(file.name, file.read_text())] == []


def test_tests_mirror_the_rooms():
    kinds = {"house", "journeys", "faults", "examples", "docs"}
    folders = {path.parent.relative_to(rules.ROOT / "tests").parts[0] for path in (rules.ROOT / "tests").rglob("test_*.py")}
    assert folders - kinds <= set(rules.FLOORS)


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
import importlib
for name in sys.argv[2:]:
    importlib.import_module(name)
print(sorted(set(sys.argv[1].split(",")) & set(sys.modules)))
"""


def module_names(*starts: str) -> list[str]:
    names = [
        "fleetune." + source.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for source in SOURCES
        if source.name.startswith(starts)
    ]
    assert names
    return [name for name in names if not name.endswith("__main__")]


def run_blocked(blocked: str, names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED, blocked, *names], capture_output=True, text=True, timeout=120)


def test_a_machine_without_torch_can_import_all_that_it_needs():
    names = [*module_names("spec/", "planning/", "launch/", "cli/"), "fleetune.models.locate", "fleetune.models.presets"]
    done = run_blocked("torch,transformers,peft,datasets,safetensors,tensorboard,accelerate", names)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_rooms_themselves_cost_nothing_to_import():
    rooms = [f"fleetune.{room}" for room in rules.FLOORS]
    done = run_blocked("torch,transformers,numpy,pydantic,yaml,click,rich", ["fleetune", *rooms])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=["ruff check", "ruff format", "mypy"],
)
def test_the_code_is_clean_for(arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=rules.ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_module_of_the_package_is_used_or_started():
    """A file that nothing imports (the scripts at the root too), that no command names and nobody starts is dead."""
    from fleetune.cli.main import COMMANDS

    used = {f"fleetune.cli.{command}" for command in COMMANDS}
    scripts = [rules.Source(path.name, path.read_text()) for path in rules.ROOT.glob("*.py")]
    for source in [*SOURCES, *scripts]:
        for _, name in rules.imported(source):
            used |= {name, name.rpartition(".")[0]}
    text = "\n".join(source.text for source in SOURCES)
    dead = []
    for source in SOURCES:
        name = "fleetune." + source.name.removesuffix(".py").replace("/", ".")
        is_started = f'"{name}"' in text or '__name__ == "__main__"' in source.text
        if not source.name.endswith("__init__.py") and name not in used and not is_started:
            dead.append(source.name)
    assert dead == []
