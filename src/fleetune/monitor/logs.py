"""Logs of one process, and their cleaning: no secret reaches a file or a screen.

Secrets are known by value (the environment's tokens, keys and passwords), by form (`hf_...`, `Bearer ...`, passwords inside
URLs) and by the name they are given to (`api_key=...`).
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

HIDDEN = "[secret]"

#: Names of environment variables whose values are secrets. TOKENIZERS_PARALLELISM and the like are none.
_SECRET_NAME = re.compile(r"TOKEN(?!I[SZ])|KEY(?!BOARD|MAP)|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
#: A shorter value (`1`, `true`, a layout `us`) would blank out ordinary words.
_MIN_SECRET = 6
_ORDINARY = {"false", "disabled", "enabled", "default", "always", "prompt", "secret"}

_FORMS = [
    # Hub, OpenAI-like, GitHub, Slack, Google and AWS credentials.
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,})"),
    re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"\bAIza[A-Za-z0-9_-]{30,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
]
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_URL_PASSWORD = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s/:@]*):[^\s/@]+@")
#: `name = value`, as configurations and error texts print it. `pad_token: <|end|>` and `trained_tokens: 512` are no secrets.
_ASSIGNED = re.compile(
    r"""(?ix)
    ( (?: (?<![a-z]) token | secret | passw(?:or)?d | api_?key | (?:access|private|auth)_key | credentials? )
      ["']? \s* [:=] \s* ["']? )
    (?! [0-9.]+ \b | none\b | null\b | true\b | false\b )
    [A-Za-z0-9_\-./+=~]{6,}
    """
)


def redact(text: str) -> str:
    """`text` with everything that looks like a secret replaced by `[secret]`."""
    for value in _environment_secrets():
        if value in text:
            text = text.replace(value, HIDDEN)
    for form in _FORMS:
        text = form.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def redact_values(value: Any) -> Any:
    """A JSON value with every text in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_values(item) for item in value]
    return value


def configure_logging(path: Path | None = None, level: str = "info") -> None:
    """Send the records of this process to standard error and, where given, to its own file. Call it once, first.

    fleetune's records from `level` on, those of libraries from warnings on. What is printed or raised goes through the same
    cleaning, tracebacks too: standard output and error are wrapped. The file is made for its owner only and appended to.
    """
    sys.stdout, sys.stderr = _cleaned(sys.stdout), _cleaned(sys.stderr)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handlers.append(_private_file(path))
    for handler in handlers:
        handler.setFormatter(_CleanFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    wanted = logging.getLevelName(level.upper())
    root.setLevel(max(wanted, logging.WARNING))
    logging.getLogger("fleetune").setLevel(wanted)
    logging.captureWarnings(True)


class _CleanFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _CleanStream(io.TextIOBase):
    """A text stream that redacts whole lines as they are written; what has no end of line yet waits for it or a flush."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            lines = (self._rest + text).splitlines(keepends=True)
            self._rest = lines.pop() if lines and not lines[-1].endswith(("\n", "\r")) else ""
            if lines:
                self.stream.write(redact("".join(lines)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._lock:
            rest, self._rest = self._rest, ""
            if rest:
                self.stream.write(redact(rest))
            self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def buffer(self) -> BinaryIO:
        """The bytes below, for libraries that insist on them; what they write there is not cleaned."""
        return self.stream.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors


def _cleaned(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, _CleanStream) else cast(TextIO, _CleanStream(stream))


def _private_file(path: Path) -> logging.Handler:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    return logging.StreamHandler(os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace"))


def _environment_secrets() -> list[str]:
    """Secret values of this process's environment, the longest first (one may contain another)."""
    values = {
        value.strip()
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value.strip()) >= _MIN_SECRET and value.strip().lower() not in _ORDINARY
    }
    return sorted(values, key=len, reverse=True)
