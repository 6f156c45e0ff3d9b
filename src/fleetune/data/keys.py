"""What prepared data is called by: the content of everything that made it. Nothing here imports a tokenizer."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleetune.data.request import DataRequest
from fleetune.data.rows import DataFile
from fleetune.spec.errors import UserError
from fleetune.spec.run_folder import read_json, write_json

_DIGEST_BYTES = 16
#: A file that changed less than this before it was hashed may change again within one tick of its clock.
_SETTLED_NS = 2_000_000_000
_MAX_REMEMBERED = 10_000
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def digest(*parts: str | bytes) -> str:
    """Hash of `parts`, as 32 hexadecimal digits."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode("utf-8") if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def tokenizer_fingerprint(folder: Path, chat_template: str | None = None) -> str:
    """Content of the tokenizer and its templates in a model folder, with the versions that read them.

    chat_template: text of a template that is used instead of the folder's own.
    """
    names = [folder / name for name in _TOKENIZER_FILES] + sorted(folder.glob("additional_chat_templates/*.jinja"))
    parts: list[str | bytes] = [importlib.metadata.version(package) for package in ("transformers", "tokenizers")]
    for path in names:
        if path.is_file():
            parts += [path.name, path.read_bytes()]
    return digest(*parts, "template", chat_template or "")


@functools.cache
def code_version() -> str:
    """Hash of this room's code: a cache never outlives the code that made it."""
    return digest(*(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))


class FileHashes:
    """Content hashes of data files, remembered by path, size, time of change and inode."""

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self._known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # only a memory: without it all is hashed again
            self._known = dict(read_json(memory)["files"])

    def of(self, path: Path) -> str:
        """The hash of one file. Raises UserError where it cannot be read or changes meanwhile."""
        name, state = str(path.resolve()), _state(path)
        known = self._known.get(name)
        if isinstance(known, list) and known[:-1] == state:
            return str(known[-1])
        found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        try:
            with open(path, "rb") as file:
                while chunk := file.read(1 << 22):
                    found.update(chunk)
        except OSError as error:
            raise UserError(f"data {str(path)!r} cannot be read: {error.strerror or error}") from error
        if _state(path) != state:
            raise UserError(f"data {str(path)!r} changed while it was read: start again when it is complete")
        if time.time_ns() - state[1] > _SETTLED_NS:
            self._known.pop(name, None)
            self._known[name] = [*state, found.hexdigest()]
        return found.hexdigest()

    def remember(self) -> None:
        """Write the memory down; a place that cannot be written to is no harm."""
        files = dict(list(self._known.items())[-_MAX_REMEMBERED:])
        with contextlib.suppress(OSError):
            write_json(self.memory, {"files": files})


def _state(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"data {str(path)!r} cannot be read: {error.strerror or error}") from error
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def data_key(files: Sequence[DataFile], request: DataRequest, hashes: FileHashes) -> str:
    """The name of the tokenised rows of `files`: content, tokenizer, template, what reads and renders them, our code."""
    content = [[file.id, file.format, file.source, *(hashes.of(part) for part in file.parts)] for file in files]
    options = [request.data_shape, sorted(request.columns.items()), request.train_on]
    return digest(json.dumps([content, options, request.tokenizer_fingerprint, code_version()]))
