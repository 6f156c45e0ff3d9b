"""The tokenizer of a GGUF file, by transformers, with what transformers does not know: how the text is split first.

A byte-level vocabulary is used after a split of the text into pieces, by a rule that the file only names
(`tokenizer.ggml.pre`). transformers knows some of the names and falls back to GPT-2's rule for the others without a word;
with another rule than in pre-training, digits and spaces become other tokens than the model ever saw.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from fleetune.models.gguf_file import GgufFile
from fleetune.spec.errors import UserError

_log = logging.getLogger(__name__)
#: Rules that are GPT-2's own, so that the fallback is right.
_LIKE_GPT2 = frozenset({"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "roberta-bpe"})
#: Every digit a piece of its own, then GPT-2's rule.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_TRIAL = "Paid 12345.67 in 2 parts:\n\n    7 + 8;\tit's déjà vu 你好 🙂"


def write_tokenizer(file: GgufFile, folder: Path, *, context_length: int | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a GGUF into `folder`.

    Raises UserError for a tokenizer that cannot be read, or that another process would read differently.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
    except (ValueError, KeyError, NotImplementedError, IndexError) as error:
        raise UserError(
            f"the tokenizer of {file.path} ({file.metadata.get('tokenizer.ggml.model')}) cannot be read by transformers "
            f"({error}): give the original model folder"
        ) from error
    _split_as_named(tokenizer, file)
    if context_length:
        tokenizer.model_max_length = context_length
    for key in ("is_local", "local_files_only", "name_or_path", "vocab_file"):
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)
    _check(tokenizer, PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True), file)


def _split_as_named(tokenizer: Any, file: GgufFile) -> None:
    from tokenizers import pre_tokenizers

    rule = file.metadata.get("tokenizer.ggml.pre")
    if file.metadata.get("tokenizer.ggml.model") != "gpt2" or rule in _LIKE_GPT2:
        return
    if rule in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif rule is None:
        _log.warning("%s does not say how its tokenizer splits text; GPT-2's rule is taken", file.path)
    elif not _has_own_split(tokenizer):
        raise UserError(
            f"{file.path} splits text by the rule {rule!r}, which transformers does not know, so that numbers and spaces "
            "would become other tokens than the model was trained on: give the original model folder"
        )


def _has_own_split(tokenizer: Any) -> bool:
    """Whether transformers knew the rule: it then replaces GPT-2's ByteLevel by a sequence that begins with a split."""
    split = json.loads(tokenizer.backend_tokenizer.to_str()).get("pre_tokenizer") or {}
    return split.get("type") == "Sequence"


def _check(made: Any, read: Any, file: GgufFile) -> None:
    """What was written must be read back as the same tokenizer, with the special tokens that the file names."""
    problems = []
    for special in (True, False):
        if made(_TRIAL, add_special_tokens=special)["input_ids"] != read(_TRIAL, add_special_tokens=special)["input_ids"]:
            problems.append("the saved tokenizer makes other tokens")
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        wanted = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if wanted is not None and getattr(read, f"{name}_token_id") != wanted:
            problems.append(f"its {name} token is {getattr(read, f'{name}_token_id')} and should be {wanted}")
    if made.chat_template != read.chat_template:
        problems.append("its chat template is another one")
    if problems:
        raise UserError(f"{file.path} could not be converted: {'; '.join(problems)}: give the original model folder")
