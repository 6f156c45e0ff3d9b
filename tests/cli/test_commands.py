"""The small commands: replies, conversations, proofs, presets."""

from __future__ import annotations

import io
import json

import pytest

from fleetune.spec.run_folder import RunFolder, append_line


def test_generate_writes_the_reply_alone_on_standard_output(command, tiny_llama):
    done = command("generate", tiny_llama, "How many?", "--max-new-tokens", "6")
    assert done.returncode == 0, done.stderr
    again = command("generate", tiny_llama, "How many?", "--max-new-tokens", "6", "--json")
    assert json.loads(again.stdout)["reply"].strip() == done.stdout.strip()


def test_generate_reads_the_prompt_from_standard_input(command, tiny_llama, monkeypatch):
    asked = command("generate", tiny_llama, "How many?", "--max-new-tokens", "6", "--json").stdout
    monkeypatch.setattr("sys.stdin", io.StringIO("How many?"))
    assert command("generate", tiny_llama, "-", "--max-new-tokens", "6", "--json").stdout == asked


def test_a_system_prompt_and_a_seed_change_what_is_drawn(command, tiny_llama):
    def reply(*flags):
        return command("generate", tiny_llama, "How many?", "--max-new-tokens", "8", "--json", *flags).stdout

    drawn = [reply("--temperature", "9", "--seed", str(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert reply("--top-p", "0.001", "--temperature", "9", "--seed", "3") == reply()
    assert reply("--system", "Answer in clips.") != reply()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "model"], "a model and a prompt are needed"),
        (["generate", "model", " "], "the prompt is empty"),
        (["generate", "nowhere", "hello"], "model 'nowhere' is no preset"),
        (["generate", "model", "hello", "--top-p", "0"], "top-p"),
        (["chat"], "for one model"),
        (["chat", "a", "b"], "for one model: a b"),
        (["evaluate", "model"], "no data is given"),
        (["export", "run"], "give --to adapter or --to merged"),
        (["export", "nowhere", "--to", "merged"], "not a run folder"),
        (["verify", "nowhere"], "no ledger"),
        (["verify", "a", "--bitwise"], "give --against RUN"),
        (["presets", "smollm2-135"], "did you mean smollm2-135m?"),
    ],
)
def test_what_is_missing_or_wrong_is_one_error_with_a_fix(words, says, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command(*words)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_chat_keeps_the_conversation_until_it_is_told_to_forget(command, tiny_llama, monkeypatch):
    def chat(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        done = command("chat", tiny_llama, "--max-new-tokens", "6")
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = chat("one")
    assert first.strip()
    twice = chat("one", "one")
    assert twice.startswith(first) and twice != first * 2, "the second reply knows of the first"
    assert chat("one", "/new", "one") == first * 2
    assert chat("", "/quit", "one") == ""


def ledger(folder, losses, *, attempt=0):
    run = RunFolder(folder)
    run.create()
    for step, loss in enumerate(losses, 1):
        row = {"attempt": attempt, "step": step, "samples": [f"a:{step}"], "trained_tokens": 3, "applied": True}
        append_line(run.ledger, {**row, "loss_hex": loss.hex(), "gradient_norm_hex": (1.0).hex()})
    return folder


def test_verify_says_how_far_two_runs_agree(command, tmp_path):
    one, same = ledger(tmp_path / "one", [2.0, 1.5]), ledger(tmp_path / "same", [2.0, 1.5])
    near, short = ledger(tmp_path / "near", [2.0, 1.6]), ledger(tmp_path / "short", [2.0])
    done = command("verify", one, "--against", same, "--bitwise")
    assert (done.returncode, done.stdout) == (0, "lost 0, repeated 0, losses bitwise\n")
    done = command("verify", one, "--against", near)
    assert done.returncode == 0 and done.stdout.startswith("lost 0, repeated 0, max relative difference 0.062")
    assert command("verify", one, "--against", near, "--bitwise").returncode == 3
    done = command("verify", short, "--against", one, "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["lost"] == 1 and json.loads(done.stdout)["holds"] is False


def test_verify_without_another_run_checks_the_ledger_itself(command, tmp_path):
    assert command("verify", ledger(tmp_path / "one", [2.0, 1.5])).returncode == 0
    twice = ledger(tmp_path / "twice", [2.0, 1.5])
    run = RunFolder(twice)
    append_line(run.ledger, {"attempt": 0, "step": 4, "samples": ["a:1"], "loss_hex": (1.0).hex()})
    done = command("verify", twice)
    assert done.returncode == 3 and "missing" in done.stdout


def test_presets_are_listed_and_shown(command):
    listed = json.loads(command("presets", "--json").stdout)
    names = [preset["name"] for preset in listed]
    assert "smollm2-135m" in names and names == sorted(names)
    text = command("presets").stdout
    assert all(name in text for name in names)
    one = json.loads(command("presets", "SmolLM2_135M", "--json").stdout)
    assert one["hub"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in command("presets", "smollm2-135m").stdout
