"""A limit on time and memory around the rendering of a chat template.

A template is a stranger's program. transformers runs it in Jinja's sandbox, where it can touch nothing, but it can loop
for ever, and write until the memory is full. The call is watched from a second thread, so that it can be stopped in any
thread (a signal would reach the main one only).
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fleetune.spec.errors import UserError

MAX_RENDERING_S = 20.0
MAX_GROWTH_BYTES = 2 << 30
_LOOK_EVERY_S = 0.02

T = TypeVar("T")


class _Stopped(Exception):
    """Raised inside the watched call, between two of its instructions."""


def bound_templates(tokenizer: Any, *, limit_s: float | None = None, growth_bytes: int | None = None) -> None:
    """Put the limit around `tokenizer.apply_chat_template`. Over it (default: the limits above), the call raises UserError."""
    render = tokenizer.apply_chat_template
    limit_s = MAX_RENDERING_S if limit_s is None else limit_s
    growth_bytes = MAX_GROWTH_BYTES if growth_bytes is None else growth_bytes

    @functools.wraps(render)
    def apply_chat_template(*values: Any, **named: Any) -> Any:
        return call_within(lambda: render(*values, **named), limit_s=limit_s, growth_bytes=growth_bytes)

    tokenizer.apply_chat_template = apply_chat_template


def call_within(call: Callable[[], T], *, limit_s: float, growth_bytes: int) -> T:
    """The result of `call()`. Raises UserError when it takes longer or when the process grows by more meanwhile.

    What stops is Python code between instructions; a single instruction (a call into C) is only noticed when it ends.
    """
    finished, turn, reasons = threading.Event(), threading.Lock(), list[str]()
    caller = threading.get_ident()

    def watch() -> None:
        import psutil

        process, began = psutil.Process(), time.monotonic()
        before = process.memory_info().rss
        while not finished.wait(_LOOK_EVERY_S):
            reason = _reason(time.monotonic() - began, process.memory_info().rss - before, limit_s, growth_bytes)
            if reason is None:
                continue
            with turn:
                if not finished.is_set():
                    reasons.append(reason)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(caller), ctypes.py_object(_Stopped))
            return

    watcher = threading.Thread(target=watch, name="template-limit", daemon=True)
    watcher.start()
    try:
        try:
            return call()
        finally:
            with turn:
                finished.set()
            if reasons:  # it may still be on its way: let it arrive here, and not in whoever called us
                time.sleep(_LOOK_EVERY_S)
    except _Stopped:
        raise UserError(f"{reasons[0]}: use another template, with --chat-template FILE") from None
    except MemoryError:
        raise UserError("the chat template filled the memory: use another template, with --chat-template FILE") from None


def _reason(seconds: float, growth: int, limit_s: float, growth_bytes: int) -> str | None:
    if seconds > limit_s:
        return f"the chat template was not done after {limit_s:g} s"
    if growth > growth_bytes:
        return f"the chat template took more than {growth_bytes >> 20} MiB of memory"
    return None
