"""Templates are programs of strangers: what they may not do, they cannot."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetune.data import sandbox
from fleetune.data.sandbox import Refused, Template

MESSAGES = [{"role": "user", "content": "q"}]
ATTACKS = {
    "reach into python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reach through a function": "{{ raise_exception.__globals__ }}",
    "reach through a method": "{{ 'a'.join.__self__.__class__ }}",
    "reach through format": "{{ '{0.__class__}'.format(messages) }}",
    "reach through attr": "{{ messages | attr('__class__') }}",
    "change the messages": "{{ messages.append(1) }}",
    "private names": "{% set n = namespace(__class__=1) %}",
    "private names later": "{% set n = namespace(a=1) %}{% set n.__init__ = 1 %}",
    "another file": "{% include '/etc/passwd' %}",
    "another template": "{% import 'os' as os %}",
    "huge power": "{{ 10 ** (10 ** 10) }}",
    "huge text": "{{ 'a' * (10 ** 10) }}",
    "endless output": "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "division by zero": "{{ 1 // 0 }}",
    "no such key": "{{ messages[5].content + 'a' }}",
    "huge range": "{% for a in range(10 ** 9) %}{% endfor %}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_RENDERED_CHARACTERS", 1 << 20)
    began = time.monotonic()
    with pytest.raises(Refused):
        text, _ = Template(ATTACKS[name], {}).render(MESSAGES, None)
        assert "class" not in text or "<" not in text, text
        raise Refused("rendered without reaching anything")
    assert time.monotonic() - began < 10


def test_a_template_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_RENDERING_S", 0.3)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    began = time.monotonic()
    with pytest.raises(Refused, match="took more than"):
        Template(endless, {}).render(MESSAGES, None)
    assert time.monotonic() - began < 5


def test_somebody_elses_alarm_rings_all_the_same() -> None:
    with _alarm(0.2) as rung:
        template = Template("{{ messages[0].content }}", {})
        end = time.monotonic() + 10
        while not rung and time.monotonic() < end:
            template.render(MESSAGES, None)
        assert rung


def test_an_alarm_that_falls_due_during_a_rendering_rings_right_after_it() -> None:
    slow = Template("{% for a in range(999) %}{% for b in range(99) %}{% endfor %}{% endfor %}", {})
    with _alarm(1e-3) as rung:
        slow.render(MESSAGES, None)
        assert rung


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[list[int]]:
    """An alarm of this process's own: the signals that its handler has seen."""
    rung: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    left = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, handler)


def test_rendering_works_outside_of_the_main_thread() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(Template("{{ 1 + 1 }}", {}).render([], None)[0]))
    thread.start()
    thread.join()
    assert found == ["2"]


def test_the_environment_of_the_process_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THIS_PROCESS", "canary-7351")
    for source in ("{{ self }}", "{{ cycler.__init__.__globals__.os.environ }}", "{{ lipsum.__globals__ }}", "{{ environ }}"):
        try:
            assert "canary-7351" not in Template(source, {}).render(MESSAGES, None)[0]
        except Refused:
            continue


def test_no_text_of_a_row_can_forge_the_marks_of_what_is_trained() -> None:
    template = Template("{{ messages[0].content }}{% generation %}x{% endgeneration %}", {})
    text, bounds = template.render([{"role": "user", "content": "\ufdd0(a\ufdd0)"}], None)
    assert text == "\ufdd0(a\ufdd0)x"
    assert bounds == [(5, 6)]


def test_broken_jinja_is_refused_with_its_reason() -> None:
    with pytest.raises(Refused, match="no valid Jinja"):
        Template("{% for %}", {})
