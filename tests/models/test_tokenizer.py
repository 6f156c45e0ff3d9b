from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from fleetune.models.template_limits import bound_templates
from fleetune.models.tokenizer import load_tokenizer, read_template
from fleetune.spec.errors import UserError

MESSAGES = [{"role": "user", "content": "hi"}]
LOOPS = {
    "for ever, silently": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "for ever, writing": "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'xxxxxxxx' }}{% endfor %}{% endfor %}",
    "calls that double": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(90) }}",
    "text that doubles": "{% set n = namespace(x='abcdefgh') %}{% for a in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "one huge text": "{{ 'x' * 10 ** 13 }}",
}
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ ('{0.__class__}' | attr('format'))(messages) }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
]


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_llama, tmp_path / "m")
    return tmp_path / "m"


def test_the_tokenizer_and_its_template_are_the_folders_own(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    text = "The quick brown fox<|im_end|>"
    assert ours.is_fast and ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.apply_chat_template(MESSAGES) == theirs.apply_chat_template(MESSAGES)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 0)


def test_a_loaded_tokenizer_is_saved_like_any_other(tiny_llama: Path, tmp_path: Path) -> None:
    """The limit around the template must not show in what is written."""
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(tiny_llama)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is type(tokenizer)
    assert again.apply_chat_template(MESSAGES) == tokenizer.apply_chat_template(MESSAGES)


def test_a_template_file_replaces_the_models_own(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endfor %}")
    tokenizer = load_tokenizer(tiny_llama, chat_template=str(path))
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "[hi]"


def test_a_base_model_keeps_having_no_template(folder: Path) -> None:
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    assert load_tokenizer(folder).chat_template is None


def test_a_template_file_that_is_none_is_one_clear_error(tmp_path: Path) -> None:
    files = {
        "absent.jinja": None,
        "open.jinja": b"a\n{% for x in %}",
        "binary.jinja": b"\xff\xfe\x00",
        "big.jinja": b" " * (2 << 20),
    }
    for name, raw in files.items():
        if raw is not None:
            (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=name):
            read_template(tmp_path / name)
    (tmp_path / "folder.jinja").mkdir()
    with pytest.raises(UserError, match=r"folder\.jinja"):
        read_template(tmp_path / "folder.jinja")


@pytest.mark.parametrize("attack", list(LOOPS))
def test_a_template_that_never_ends_or_fills_the_memory_is_stopped(attack: str, tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = LOOPS[attack]
    bound_templates(tokenizer, limit_s=1.0, growth_bytes=256 << 20)
    began = time.monotonic()
    with pytest.raises(UserError, match="chat template"):
        tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert time.monotonic() - began < 20
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "hi"


def test_a_template_is_stopped_in_a_thread_too(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = LOOPS["for ever, silently"]
    bound_templates(tokenizer, limit_s=0.3)
    caught: list[BaseException] = []

    def render() -> None:
        try:
            tokenizer.apply_chat_template(MESSAGES, tokenize=False)
        except UserError as error:
            caught.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive() and "0.3 s" in str(caught[0])


def test_the_limit_is_on_what_load_tokenizer_gives_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "chat_template.jinja").write_text(LOOPS["for ever, silently"])
    monkeypatch.setattr("fleetune.models.template_limits.MAX_RENDERING_S", 0.3)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(UserError, match=r"not done after 0\.3 s.*--chat-template"):
        tokenizer.apply_chat_template(MESSAGES, tokenize=False)


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_reach_into_python(template: str, folder: Path) -> None:
    """It is refused, or finds nothing there (Jinja's way with format)."""
    from jinja2.exceptions import SecurityError, UndefinedError

    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    with contextlib.suppress(SecurityError, UndefinedError):
        assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == ""


def test_code_beside_a_tokenizer_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / "tokenization_evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}, "tokenizer_class": "Evil"}
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"tokenization_evil\.py.*--allow-remote-code"):
        load_tokenizer(folder)
    assert not marker.exists()


def test_code_of_another_repository_is_refused_even_where_code_is_allowed(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"auto_map": {"AutoTokenizer": ["someone/else--t.Evil", None]}}))
    with pytest.raises(UserError, match="someone/else"):
        load_tokenizer(folder, allow_remote_code=True)


def test_a_folder_without_a_tokenizer_is_one_clear_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        load_tokenizer(tmp_path / "absent")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"no": "tokenizer"}')
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(folder)
