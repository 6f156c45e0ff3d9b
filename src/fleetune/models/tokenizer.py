"""The tokenizer of a model folder: data files only, a fast one, its chat template bounded."""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path
from typing import Any

from fleetune.models.config import CONFIG_FILE, code_files, load_config, read_json_object
from fleetune.models.template_limits import bound_templates
from fleetune.spec.errors import UserError

MAX_TEMPLATE_BYTES = 1 << 20
#: Older versions of Jinja let a template out of its sandbox (CVE-2024-56326, CVE-2025-27516).
_SAFE_JINJA = (3, 1, 6)
_log = logging.getLogger(__name__)


def load_tokenizer(folder: Path, *, chat_template: str | Path | None = None, allow_remote_code: bool = False) -> Any:
    """The fast transformers tokenizer of a model folder. Opens no connection.

    chat_template: a Jinja file that replaces the model's own template. A model without a template (a base model) keeps
    having none (`tokenizer.chat_template is None`). `tokenizer.apply_chat_template` is limited in time and memory.
    Raises UserError: no tokenizer, code that nobody allowed, no fast form, a template that is no Jinja.
    """
    _check_jinja()
    template = read_template(Path(chat_template)) if chat_template is not None else None
    _check_code(folder, allow_remote_code)
    tokenizer = _load(folder, allow_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {folder} ({type(tokenizer).__name__}) has no fast form: add a tokenizer.json to the folder"
        )
    if template is not None:
        tokenizer.chat_template = template
    bound_templates(tokenizer)
    return tokenizer


def read_template(path: Path) -> str:
    """The text of a chat template. Raises UserError: missing, too large, not UTF-8, not Jinja."""
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise UserError(
                f"chat template {path} has {path.stat().st_size:,} bytes: give one of at most {MAX_TEMPLATE_BYTES:,}"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat template {path} cannot be read ({error}): give a Jinja file in UTF-8") from error
    # transformers' own tag, which plain Jinja does not know, is taken out for the check.
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", _generation_tag()])
    try:
        environment.parse(text)
    except TemplateSyntaxError as error:
        raise UserError(f"chat template {path} is no valid Jinja (line {error.lineno}: {error.message}): mend it") from error
    return text


def _generation_tag() -> Any:
    """Jinja extension for `{% generation %}`, which marks the assistant's words in templates of transformers."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _load(folder: Path, allow_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give one that holds a tokenizer")
    named = {}
    if (folder / CONFIG_FILE).is_file():  # else transformers reads it itself, unchecked
        named["config"] = load_config(folder, allow_remote_code=allow_remote_code)
    try:
        return AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=allow_remote_code, local_files_only=True, **named
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the tokenizer of {folder} cannot be read ({first}): put the model's tokenizer.json and "
            "tokenizer_config.json there"
        ) from error


def _check_code(folder: Path, allow_remote_code: bool) -> None:
    path = folder / "tokenizer_config.json"
    entries = read_json_object(path).get("auto_map") if path.is_file() else None
    if not entries:
        return
    files = ", ".join(file.name for file in code_files(folder)) or "none of them is here"
    if not allow_remote_code:
        raise UserError(
            f"{path} asks to run Python code that comes with the tokenizer ({files}): give --allow-remote-code if you trust "
            "whoever wrote it with everything you can do on this machine"
        )
    if "--" in str(entries):
        raise UserError(f"{path} takes its code from another repository ({entries}): copy its Python files into the folder")
    _log.warning("running code that comes with the tokenizer: %s", files)


def _check_jinja() -> None:
    version = metadata.version("jinja2")
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < _SAFE_JINJA:
        raise UserError(f"jinja2 {version} lets chat templates out of their sandbox: run `pip install -U 'jinja2>=3.1.6'`")
