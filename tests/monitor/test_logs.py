from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fleetune.monitor.logs import HIDDEN, redact

CANARY = "correct-horse-battery"

PROGRAM = """
import logging, os, sys, threading, warnings
from pathlib import Path
from fleetune.monitor.logs import configure_logging

configure_logging(Path(sys.argv[1]), sys.argv[2])
log = logging.getLogger("fleetune.training.worker")
secret = os.environ["WAREHOUSE_SECRET"]
log.debug("a detail")
log.info("using %s", secret)
log.info("mapping %s", {"token": "abcdef123456", "step": 3})
logging.getLogger("transformers").info("chatter")
logging.getLogger("transformers").warning("library with hf_AbCdEfGhIjKlMnOp")
warnings.warn("careful with " + secret)
print("printed " + secret)
sys.stderr.write("in " + secret[:8])
sys.stderr.write(secret[8:] + " two writes\\n")
try:
    raise ValueError("caught: " + secret)
except ValueError:
    log.exception("it went wrong")
thread = threading.Thread(target=lambda: 1 / 0 if secret is None else int(secret))
thread.start(); thread.join()
raise RuntimeError("uncaught: " + secret)
"""


def run(tmp_path: Path, level: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    log = tmp_path / "logs" / "rank-00000-attempt-000.log"
    environment = {**os.environ, "WAREHOUSE_SECRET": CANARY, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log), level], capture_output=True, text=True, env=environment, check=False
    )
    return log, done


def test_no_secret_reaches_a_log_or_the_screen_by_any_way(tmp_path: Path) -> None:
    log, done = run(tmp_path, "debug")
    written = log.read_text()
    for text in (written, done.stdout, done.stderr):
        for canary in (CANARY, "abcdef123456", "hf_AbCdEfGhIjKlMnOp"):
            assert canary not in text
    assert f"using {HIDDEN}" in written and f"caught: {HIDDEN}" in written and "Traceback" in written
    assert f"careful with {HIDDEN}" in written
    assert done.stdout == f"printed {HIDDEN}\n"
    assert f"in {HIDDEN} two writes" in done.stderr, "a secret in two writes is found too"
    assert f"uncaught: {HIDDEN}" in done.stderr and f"invalid literal for int() with base 10: '{HIDDEN}'" in done.stderr
    assert "'step': 3" in written and done.returncode == 1


@pytest.mark.claim(
    "X37",
    command="fleetune train --log-level debug",
    seen="a log for each rank and attempt",
)
def test_the_level_holds_for_our_records_and_libraries_speak_from_warnings_on(tmp_path: Path) -> None:
    log, _ = run(tmp_path / "a", "debug")
    assert "a detail" in log.read_text() and "chatter" not in log.read_text()
    assert "library with" in log.read_text()
    log, _ = run(tmp_path / "b", "info")
    assert "a detail" not in log.read_text() and "using" in log.read_text()
    log, _ = run(tmp_path / "c", "error")
    assert "library with" not in log.read_text() and "it went wrong" in log.read_text()


def test_a_log_is_its_owner_s_alone_and_a_link_is_not_followed(tmp_path: Path) -> None:
    log, _ = run(tmp_path, "info")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    target = tmp_path / "precious"
    target.write_text("precious")
    log.unlink()
    log.symlink_to(target)
    _, done = run(tmp_path, "info")
    assert done.returncode == 1 and target.read_text() == "precious"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("token hf_abcdefghijklmnop in a url", f"token {HIDDEN} in a url"),
        ("sk-proj-abcdefghijklmnop1234", HIDDEN),
        ("ghp_0123456789abcdef0123", HIDDEN),
        ("Authorization: Bearer abc.def-ghi_jkl", f"Authorization: Bearer {HIDDEN}"),
        ("https://me:hunter22@host/x", f"https://me:{HIDDEN}@host/x"),
        ("api_key=0a1b2c3d4e", f"api_key={HIDDEN}"),
        ('{"hub_token": "abcDEF123"}', f'{{"hub_token": "{HIDDEN}"}}'),
        ("WANDB_API_KEY: aaaabbbbcccc", f"WANDB_API_KEY: {HIDDEN}"),
        ("password = swordfish", f"password = {HIDDEN}"),
    ],
)
def test_secrets_are_known_by_form_and_by_name(text: str, clean: str) -> None:
    assert redact(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "trained_tokens: 123456, tokens_per_s=345.678912",
        "eos_token: '<|im_end|>', pad_token=<|endoftext|>",
        "token: 123456789",
        "tokenizer: /models/smollm2/tokenizer.json",
        "the key layers.0.self_attn.k_proj.weight is missing",
        "token = None",
        "TOKENIZERS_PARALLELISM=false was set",
        "https://huggingface.co/HuggingFaceTB/SmolLM2-135M",
        "step 12/60  loss 2.1345  learning rate 1.0e-04",
    ],
)
def test_ordinary_words_stay_as_they_are(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "tokenizer")
    monkeypatch.setenv("MODEL_KEY", "step")
    assert redact(text) == text


def test_of_two_secrets_the_longer_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "swordfish")
    monkeypatch.setenv("B_TOKEN", "swordfish-and-chips")
    assert redact("say swordfish-and-chips") == f"say {HIDDEN}"
