"""Rendering a chat template. Templates are programs of strangers: they run in Jinja's sandbox, with a limit on time and size.

What a template may use is what Hugging Face chat templates may use (docs: "Chat templates", transformers 5): trimmed
blocks, loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`. A test compares
the renderings with those of `apply_chat_template`.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

#: Templates that write the date get this one, so that the same rows are the same tokens tomorrow and on every node.
FIXED_DATE = datetime(2024, 7, 26)
MAX_RENDERED_CHARACTERS = 128 << 20
MAX_RENDERING_S = 20.0


class Refused(ValueError):
    """The template does not render this conversation; the message says why."""


#: Marks around what `{% generation %}` encloses. They hold a number that no text can know, so that no row can forge them.
_NONCE = secrets.token_hex(8)
_OPEN, _CLOSE = f"\ufdd0{_NONCE}(", f"\ufdd0{_NONCE})"
_MARKS = re.compile(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: the text inside is what the assistant says. Its bounds are marked."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        parser.environment.extend(writes_generation=True)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark", []), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Names(Namespace):
    """Jinja's namespace without names that reach into Python."""

    def __init__(self, *values: Any, **named: Any) -> None:
        given = dict(*values, **named)
        for name in given:
            _refuse_private(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError("a namespace takes no names that begin with _")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox without arithmetic that fills the memory or never ends inside of one instruction."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [abs(value) if isinstance(value, int) else len(value) for value in (left, right) if isinstance(value, _SIZED)]
        if len(sizes) == 2 and (max(sizes) > 1 << 20 or (operator == "**" and max(sizes) > 1 << 10)):
            raise SecurityError(f"{operator} with a number or text of that size is not allowed")
        return super().call_binop(context, operator, left, right)


_SIZED = (int, str, list, tuple)


class Template:
    """A compiled chat template. constants: special tokens that it may name (bos_token, eos_token, ...)."""

    def __init__(self, source: str, constants: dict[str, Any]) -> None:
        """Raises Refused where the source is no valid template."""
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now, namespace=_Names, dict=_make_dict)
        self.source = source
        self.constants = constants
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise Refused(f"the chat template is no valid Jinja: {error}") from error
        self.marks_generation = bool(getattr(environment, "writes_generation", False))

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the bounds of what `{% generation %}` encloses in it. Raises Refused."""
        pieces: list[str] = []
        size = 0
        try:
            with _time_limit(MAX_RENDERING_S):
                for piece in self._template.generate(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self.constants,
                ):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_RENDERED_CHARACTERS:
                        raise Refused(f"the chat template writes more than {MAX_RENDERED_CHARACTERS >> 20} Mi characters")
        except Refused:
            raise
        except TimeoutError:
            raise Refused(f"the chat template took more than {MAX_RENDERING_S:.0f} s") from None
        except (
            TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            LookupError,
            MemoryError,
            RecursionError,
        ) as error:
            raise Refused(f"the chat template refuses it: {str(error) or type(error).__name__}") from error
        return _without_marks("".join(pieces))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return FIXED_DATE.strftime(pattern)


def _make_dict(*values: Any, **named: Any) -> dict[str, Any]:
    return dict(*values, **named)


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    if _OPEN not in text:
        return text, []
    bounds: list[tuple[int, int]] = []
    kept: list[str] = []
    length, opened = 0, 0
    for piece in _MARKS.split(text):
        if piece == _OPEN:
            opened = length
        elif piece == _CLOSE:
            bounds.append((opened, length))
        else:
            kept.append(piece)
            length += len(piece)
    return "".join(kept), bounds


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`. Only the main thread can be interrupted; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    began = time.monotonic()
    # Somebody else's alarm is stopped before the handler changes, so that it can never ring as ours.
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    handler = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's alarm goes on where it was
            _resume_alarm(left - (time.monotonic() - began), interval)


def _resume_alarm(left: float, interval: float) -> None:
    """One that is due rings here and now: set to a short time instead, a row of renderings would put it off for ever."""
    if left > 0:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        return
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    signal.raise_signal(signal.SIGALRM)
