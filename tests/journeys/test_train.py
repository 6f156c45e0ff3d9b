"""The main job, as a person runs it: train, look, use the result elsewhere."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest

from journeys.journey import SMALL, fleetune, losses, rows_of, samples, write_rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with data and a finished LoRA run of one process, with held-out rows and exact match."""
    folder = tmp_path_factory.mktemp("trained")
    write_rows(folder / "rows.jsonl")
    write_rows(folder / "held_out.jsonl", 6, first=100)
    done = fleetune(
        "train", "--model", tiny_llama, "--data", "rows.jsonl", "--validation", "held_out.jsonl", "--run", "run",
        "--epochs", "3", "--evaluate-every", "5", "--exact-match", "--max-new-tokens", "8", *SMALL, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_the_held_out_loss_falls_and_the_summary_says_so(trained: Path):
    summary = json.loads((trained / "run" / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"] - 0.5
    assert summary["after"]["perplexity"] == pytest.approx(math.exp(summary["after"]["loss"]))
    assert summary["before"]["rows"] == summary["after"]["rows"] == 6
    assert summary["before"]["exact_match"] == 0.0
    assert summary["trained_tokens"] == sum(row["trained_tokens"] for row in rows_of(trained / "run" / "ledger.jsonl"))


@pytest.mark.claim(
    "X44",
    command="fleetune train",
    seen="time, tokens/s, waiting, bytes sent and peak memory of every step",
)
def test_every_step_has_a_record_with_all_figures(trained: Path):
    steps = [row for row in rows_of(trained / "run" / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    wanted = {
        "version", "attempt", "step", "loss", "gradient_norm", "learning_rate", "tokens", "trained_tokens", "tokens_per_s",
        "step_s", "data_wait_s", "bytes_sent", "peak_memory_bytes", "time",
    }  # fmt: skip
    assert all(wanted <= set(row) for row in steps)
    assert all(row["peak_memory_bytes"] > 10_000_000 and row["tokens"] >= row["trained_tokens"] > 0 for row in steps)
    validations = [row for row in rows_of(trained / "run" / "metrics.jsonl") if "validation_loss" in row]
    assert validations[0]["step"] == 0 and validations[-1]["step"] == steps[-1]["step"]


def test_each_epoch_sees_each_row_once(trained: Path):
    seen: dict[str, int] = {}
    for step in samples(trained / "run"):
        for sample in step:
            seen[sample] = seen.get(sample, 0) + 1
    assert len(seen) == 48 and set(seen.values()) == {3}


def test_plain_peft_loads_the_adapter_with_the_loss_that_was_reported(trained: Path, tiny_llama: Path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, trained / "run" / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "run" / "adapter")
    total, count = 0.0, 0
    for row in rows_of(trained / "held_out.jsonl"):
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        # An answer ends with its end of turn; the line end that the template writes behind it is not trained.
        tokens = torch.tensor(tokenizer.apply_chat_template(messages, return_dict=False)[:-1])
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0]
        targets = tokens[len(asked) :]
        picked = torch.log_softmax(logits[len(asked) - 1 : -1], -1).gather(1, targets[:, None])
        total, count = total - float(picked.sum()), count + len(targets)
    after = json.loads((trained / "run" / "summary.json").read_text())["after"]
    assert count == after["trained_tokens"]
    assert total / count == pytest.approx(after["loss"], abs=1e-5)


@pytest.mark.claim(
    "H38",
    command="fleetune train --gpus 2",
    seen="the same losses and samples as one process",
)
@pytest.mark.claim(
    "X50",
    command="fleetune train --gpus 1; fleetune train --gpus 2",
    seen="the same command and losses on one and two processes; nothing leaves the machine",
)
def test_two_processes_train_as_one(trained: Path, tiny_llama: Path):
    done = fleetune(
        "train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "two", "--gpus", "2", "--micro-batch-size", "1",
        "--epochs", "3", *SMALL, cwd=trained,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert samples(trained / "two") == samples(trained / "run")
    one = [float.fromhex(loss) for loss in losses(trained / "run")]
    two = [float.fromhex(loss) for loss in losses(trained / "two")]
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert two == pytest.approx(one, rel=1e-3)
    (start,) = [row for row in rows_of(trained / "two" / "events.jsonl") if "ranks" in row]
    assert start["layout"] == {"replicate": 2, "shard": 1, "tensor": 1, "pipeline": 1}
    assert [row["layout"]["replicate"] for row in start["ranks"]] == [0, 1]
    assert {row["optimizer_bytes"] for row in start["ranks"]} == {8 * start["trained_parameters"]}


@pytest.mark.parametrize(("kind", "precision"), [("merged", None), ("adapter", None), ("merged", "bf16"), ("merged", "fp16")])
def test_merged_and_adapter_exports_are_checked_and_published(trained: Path, kind: str, precision: str | None):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    asked = [] if precision is None else ["--precision", precision]
    done = fleetune("export", "run", "--to", kind, "--out", f"{kind}-{precision}", *asked, "--json", cwd=trained)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    largest = {None: 1e-3, "bf16": 0.3, "fp16": 0.05}[precision]
    assert report["max_difference"] < largest and report["divergence"] <= report["tolerance"]
    (weights,) = Path(trained, report["path"]).glob("*.safetensors")
    dtype = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {tensor.dtype for tensor in load_file(weights).values()} == {dtype}
    if kind == "merged":
        assert AutoModelForCausalLM.from_pretrained(Path(trained, report["path"])).dtype == dtype


def test_an_export_that_lost_an_adapter_matrix_is_not_published(trained: Path, monkeypatch: pytest.MonkeyPatch):
    from fleetune.models import merge
    from fleetune.spec.errors import CheckFailed
    from fleetune.training.export import export_run

    def forgets_one(base, weights, adapter, **options):
        name = next(name for name in weights if "lora_B" in name or "lora_b" in name)
        return whole(base, {**weights, name: weights[name] * 0}, adapter, **options)

    whole = merge.merged_tensors
    monkeypatch.setattr(merge, "merged_tensors", forgets_one)
    with pytest.raises(CheckFailed, match="nothing was published"):
        export_run(str(trained / "run"), to="merged", out=trained / "lost")
    assert not (trained / "lost").exists()


def test_evaluate_says_what_the_summary_says(trained: Path):
    done = fleetune("evaluate", "run", "--data", "held_out.jsonl", "--sequence-length", "64", "--json", cwd=trained)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    after = json.loads((trained / "run" / "summary.json").read_text())["after"]
    assert found["loss"] == pytest.approx(after["loss"], rel=1e-5)
    assert (found["rows"], found["trained_tokens"]) == (after["rows"], after["trained_tokens"])
    assert found["exact_match"] is None


def test_generate_replies_on_stdout(trained: Path):
    done = fleetune("generate", "run", "How many clips are 3 and 3?", "--max-new-tokens", "5", cwd=trained)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_run_folder_that_exists_is_not_touched_without_resume(trained: Path, tiny_llama: Path):
    before = {path: path.stat().st_mtime_ns for path in (trained / "run").rglob("*")}
    done = fleetune("train", "--model", tiny_llama, "--data", "rows.jsonl", "--run", "run", *SMALL, cwd=trained)
    assert done.returncode == 2 and "--resume" in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in (trained / "run").rglob("*")}


def test_full_fine_tuning_gives_a_model_that_plain_transformers_loads(trained: Path, tiny_llama: Path):
    import torch
    from transformers import AutoModelForCausalLM

    done = fleetune(
        "train", "--model", tiny_llama, "--data", "rows.jsonl", "--validation", "held_out.jsonl", "--run", "full",
        "--method", "full", "--learning-rate", "5e-3", "--epochs", "2", "--sequence-length", "64", "--precision", "fp32",
        cwd=trained,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((trained / "full" / "summary.json").read_text())
    assert summary["after"]["loss"] < summary["before"]["loss"]
    old = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).state_dict()
    new = AutoModelForCausalLM.from_pretrained(trained / "full" / "model", dtype=torch.float32).state_dict()
    assert set(old) == set(new) and all(not torch.equal(old[name], new[name]) for name in old if name.endswith("proj.weight"))


def test_the_result_of_a_model_without_a_template_carries_the_one_it_was_trained_with(tmp_path: Path):
    from transformers import AutoTokenizer

    import tiny

    base = tiny.write_model(tmp_path / "base", "llama")
    (base / "chat_template.jinja").unlink()
    rows = [{**row, "system": "Count clips, don't lie."} for row in rows_of(write_rows(tmp_path / "rows.jsonl", 16))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = fleetune("train", "--model", base, "--data", "rows.jsonl", "--run", "run", "--max-steps", "2", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = next(line for line in done.stderr.splitlines() if line.startswith("ask it:"))
    assert shlex.split(asked)[2:-1] == ["fleetune", "generate", "run", "--system", "Count clips, don't lie."]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter")
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "2 clips."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False).endswith(f"How many?\n2 clips.{tokenizer.eos_token}")
    done = fleetune("generate", "run", "How many?", "--max-new-tokens", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_run_is_asked_with_the_template_it_was_trained_with(tmp_path: Path, tiny_llama: Path):
    """Not with the base model's: the held-out loss of both would differ."""
    (tmp_path / "own.jinja").write_text(
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    write_rows(tmp_path / "rows.jsonl", 16)
    write_rows(tmp_path / "held_out.jsonl", 6, first=100)
    done = fleetune(
        "train", "--model", tiny_llama, "--data", "rows.jsonl", "--validation", "held_out.jsonl", "--run", "run",
        "--max-steps", "2", "--chat-template", "own.jinja", *SMALL, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = fleetune("evaluate", "run", "--data", "held_out.jsonl", "--sequence-length", "64", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = json.loads((tmp_path / "run" / "summary.json").read_text())["after"]
    assert json.loads(done.stdout)["loss"] == pytest.approx(after["loss"], rel=1e-5)


@pytest.mark.long
def test_the_precision_of_a_run_is_that_of_its_figures_too(tmp_path: Path, tiny_llama: Path):
    """Evaluated in what it was trained in, whatever this machine would choose; in 16 bits the loss is another one."""
    write_rows(tmp_path / "rows.jsonl", 16)
    write_rows(tmp_path / "held_out.jsonl", 6, first=100)
    for precision in ("fp32", "bf16"):
        done = fleetune(
            "train", "--model", tiny_llama, "--data", "rows.jsonl", "--validation", "held_out.jsonl", "--run", precision,
            "--max-steps", "2", "--sequence-length", "64", "--precision", precision, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        done = fleetune("evaluate", precision, "--data", "held_out.jsonl", "--sequence-length", "64", "--json", cwd=tmp_path)
        after = json.loads((tmp_path / precision / "summary.json").read_text())["after"]
        assert json.loads(done.stdout)["loss"] == pytest.approx(after["loss"], rel=1e-6)
