"""The house rules as checks of source text. Each gives its breaches as sentences; `test_rules.py` proves that each can."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fleetune"

#: Room -> floor. Rooms of one floor have no doors between them.
FLOORS = {
    "spec": 1,
    "planning": 2,
    "models": 2,
    "data": 2,
    "checkpoint": 2,
    "monitor": 2,
    "launch": 2,
    "parallel": 3,
    "training": 4,
    "cli": 5,
    "bridges": 5,
    "bench": 5,
}
#: Names for leftovers.
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "tools", "misc", "base", "core", "lib", "shared", "stuff"}
FORBIDDEN_CLASS_PARTS = ("Manager", "Handler", "Helper", "Mixin")
#: Rooms and files that a machine without torch can use.
TORCH_FREE = ("spec/", "planning/", "launch/", "cli/", "models/locate.py", "models/presets.py", "__init__.py")
HEAVY = {
    "torch",
    "transformers",
    "peft",
    "datasets",
    "tensorboard",
    "safetensors",
    "accelerate",
    "gguf",
    "bitsandbytes",
    "deepspeed",
}
PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pandas"}

MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 66
MAX_PARAMETERS = 6


@dataclass(frozen=True)
class Source:
    """One file of the package. name: relative to the package, as `data/read.py`."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        return self.name.split("/")[0] if "/" in self.name else ""


def package_sources() -> list[Source]:
    return [Source(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]


def imported(source: Source, *, for_types: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported, inside functions too; relative imports are resolved.

    for_types: also what is imported for annotations only (`if TYPE_CHECKING:`), which costs nothing when it runs.
    """
    package = ["fleetune", *source.name.removesuffix(".py").split("/")[:-1]]
    tree = source.tree if for_types else _WithoutTypes().visit(source.tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*start, node.module] if node.module else start)
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node).endswith(("import_module", "__import__")) and node.args:
            yield node.lineno, str(getattr(node.args[0], "value", ""))


class _WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else self.generic_visit(node)


def breaches_of_floors(source: Source) -> list[str]:
    """Imports of a room above, or beside: those for types too, since a reader must follow them."""
    found = []
    for line, name in imported(source):
        parts = name.split(".")
        if parts[0] != "fleetune" or len(parts) < 2:
            continue
        target = parts[1]
        if target not in FLOORS:
            continue
        if source.room not in FLOORS:
            if source.name != "__init__.py":
                found.append(f"{source.name}:{line} is in no room and imports {name}")
        elif target != source.room and FLOORS[target] >= FLOORS[source.room]:
            found.append(f"{source.name}:{line} imports {name}: floor {FLOORS[target]} from floor {FLOORS[source.room]}")
    return found


def breaches_of_weight(source: Source) -> list[str]:
    """torch and its like in files that a login node without them uses."""
    if not (source.name.startswith(TORCH_FREE[:4]) or source.name in TORCH_FREE):
        return []
    return [
        f"{source.name}:{line} imports {name}"
        for line, name in imported(source, for_types=False)
        if name.split(".")[0] in HEAVY
    ]


def breaches_of_safety(source: Source) -> list[str]:
    """Whatever could run code that came as data, or put a text into a shell."""
    found = [f"imports {name}" for _, name in imported(source) if name.split(".")[0] in PICKLING]
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        called = _called(node)
        last = called.rpartition(".")[2]
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in ("torch.load", "torch.save", "torch.jit.load", "torch.package.PackageImporter"):
            found.append(f"line {node.lineno} calls {called}, which pickles")
        if called in ("np.load", "numpy.load", "np.save", "numpy.save") and not _is_constant(
            options.get("allow_pickle"), False
        ):
            found.append(f"line {node.lineno} calls {called} without allow_pickle=False")
        if called in ("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"):
            found.append(f"line {node.lineno} calls {called}")
        if called in ("eval", "exec", "os.system", "os.popen", "commands.getoutput", "subprocess.getoutput"):
            found.append(f"line {node.lineno} calls {called}")
        if "shell" in options and not _is_constant(options["shell"], False):
            found.append(f"line {node.lineno} gives shell= to {called}")
        if last in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list"):
            found.append(f"line {node.lineno} calls {last}, which pickles")
    return [f"{source.name}: {breach}" for breach in found]


def breaches_of_names(source: Source) -> list[str]:
    """Rooms for leftovers, and classes that say nothing of what they are."""
    found = [f"{source.name}: the name {part}" for part in _parts(source.name) if part in FORBIDDEN_NAMES]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            plain = node.name.lstrip("_")
            if any(part in plain for part in FORBIDDEN_CLASS_PARTS) or re.match(r"Base[A-Z]", plain) or plain == "Base":
                found.append(f"{source.name}:{node.lineno} the class {node.name}")
    if source.room and source.room not in FLOORS:
        found.append(f"{source.name}: the room {source.room} is on no floor")
    return found


def breaches_of_size(source: Source) -> list[str]:
    """Files, functions and parameter lists that have grown too long."""
    lines = source.text.count("\n")
    found = [f"{source.name} has {lines} lines"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            found.append(f"{source.name}:{node.lineno} {node.name} has {length} lines")
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        num_parameters = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))
        if num_parameters > MAX_PARAMETERS:
            found.append(f"{source.name}:{node.lineno} {node.name} has {num_parameters} parameters that are not keywords")
    return found


def breaches_of_promises(source: Source) -> list[str]:
    """Unfinished work that only a reader would see."""
    found = []
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", line):
            found.append(f"{source.name}:{number} {line.strip()}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = ast.unparse(node.exc)
            if raised in ("NotImplementedError", "NotImplementedError()"):
                found.append(f"{source.name}:{node.lineno} raises {raised} and does not say why")
    return found


def breaches_of_tests(name: str, text: str) -> list[str]:
    """Mocks of our own code, and tests that are switched off."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if any(part in ("unittest.mock", "mock", "pytest_mock") for part in names):
                found.append(f"{name}:{node.lineno} imports a mock")
        if isinstance(node, ast.Call) and _called(node) == "pytest.mark.xfail":
            found.append(f"{name}:{node.lineno} expects to fail")
    return found


def _parts(name: str) -> list[str]:
    return name.removesuffix(".py").split("/")


def _called(node: ast.Call) -> str:
    """Dotted name of what is called, as far as it is a name."""
    parts: list[str] = []
    target: ast.expr = node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    parts.append(target.id if isinstance(target, ast.Name) else "?")
    return ".".join(reversed(parts))


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
