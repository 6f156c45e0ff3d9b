"""YAML as data and nothing else: no tags, no surprises of YAML 1.1, and limits for whatever a stranger wrote.

Scalars are read by YAML 1.2's core rules: `1e-5` is a number, `on`, `no`, `12:30` and `2024-01-01` are text. Who needs a
switch reads `on` and `off` as one (`fleetune.spec.read`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fleetune.spec.errors import UserError

MAX_BYTES = 1 << 20
#: Values of one file, each alias counted as often as it is used: `a: &a [1, 2]` written ten times is thirty.
MAX_VALUES = 20_000
MAX_DEPTH = 16

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WHOLE = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(frozen=True)
class Document:
    """One YAML mapping. lines: key -> line where it stands, from 1. texts: key -> a scalar as it is written, quotes off."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError with all duplicate keys, or the first line that is no plain YAML."""
    return read_document(path).values


def read_document(path: Path) -> Document:
    """The mapping in a YAML file, and where everything stands. Raises UserError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: give the YAML file of a run") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give the YAML file of a run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} has more than {MAX_BYTES:,} bytes, which is no description of a run: give another file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """The mapping that `text` holds; `name` is what errors call it."""
    try:
        _check_events(text, name)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"{name}, line {line}: {error.problem or 'this is no YAML'}: mend the line") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name} is no YAML: {str(error).splitlines()[0]}") from None
    if node is None:
        return Document()
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{name} holds no `name: value` lines: write one setting a line, as in `model: smollm2-135m`")
    builder = _Builder(name)
    values = builder.value(node)
    if builder.problems:
        raise UserError(*builder.problems)
    keys = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    return Document(
        values,
        {key.value: key.start_mark.line + 1 for key, _ in keys},
        {key.value: value.value for key, value in keys if isinstance(value, yaml.ScalarNode)},
    )


def _check_events(text: str, name: str) -> None:
    """Depth and tags, before anything recursive sees the text: a million `[` must not end the process."""
    depth = 0
    documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else "?"
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
            if depth > MAX_DEPTH:
                raise UserError(f"{name}, line {line}: nested deeper than {MAX_DEPTH} levels: write it flat")
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise UserError(f"{name}, line {line}: a second document begins: keep one")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise UserError(f"{name}, line {line}: the tag {tag} is not allowed: write the plain value")


class _Builder:
    """Plain values of nodes. Every visit counts, so that aliases that multiply each other are stopped early."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[str] = []
        self.visited = 0

    def value(self, node: yaml.Node, depth: int = 0) -> Any:
        self.visited += 1
        if self.visited > MAX_VALUES or depth > MAX_DEPTH:
            raise UserError(
                f"{self.name}, line {node.start_mark.line + 1}: with its aliases (*name) the file has more than "
                f"{MAX_VALUES:,} values or {MAX_DEPTH} levels: write the values out"
            )
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.style else plain_scalar(node.value)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, depth + 1) for item in node.value]
        return dict(self.items(node, depth))

    def items(self, node: Any, depth: int) -> Iterator[tuple[str, Any]]:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(f"{self.name}, line {line}: a name must be one word")
            elif key.value == "<<" and not key.style:
                self.problems.append(f"{self.name}, line {line}: merging with << is not read: write the values out")
            elif key.value in first:
                self.problems.append(
                    f"{self.name}: {key.value} is given in line {first[key.value]} and again in line {line}: keep one of them"
                )
            else:
                first[key.value] = line
                yield key.value, self.value(value, depth + 1)


def plain_scalar(text: str) -> Any:
    """None, bool, int, float or text of an unquoted scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _WHOLE.fullmatch(text) and len(text) <= 400:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes what `parse` reads back as the same value: whatever could be taken for something else is quoted."""


_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@+-]*")


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) and isinstance(plain_scalar(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _text)
# No anchors in what we write: two equal lists are two lists.
_Dumper.ignore_aliases = lambda self, data: True  # type: ignore[method-assign]


def dump(values: dict[str, Any]) -> str:
    """`values` as YAML text in their order, for people to read and for `parse` to read back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
