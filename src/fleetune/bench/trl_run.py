"""TRL's SFTTrainer on the rows of a prepared fleetune run: `python -m fleetune.bench.trl_run RUN_FOLDER OUT.jsonl ...`.

It gets the very tokens and the very mask of what is trained, so that both programs do the same work. Its settings are the
best that were found for it on a CPU: weights resident in bf16 for LoRA, packing without padding, no checkpointing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from fleetune.data.store import TokenStore
from fleetune.spec.run_folder import RunFolder, read_json


def rows_of(store: TokenStore, count: int) -> list[dict[str, list[int]]]:
    """The first documents of a store as rows that TRL takes as tokenised."""
    rows = []
    for number in range(min(count, store.num_documents)):
        tokens, trained = store.document(number)
        rows.append({"input_ids": tokens.tolist(), "completion_mask": trained.astype(int).tolist()})
    return rows


def train(options: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(options.threads)
    prepared = read_json(RunFolder(options.run).prepared)
    is_lora = options.method == "lora"
    is_bf16 = prepared["precision"] == "bf16"
    rows = rows_of(TokenStore.open(Path(prepared["store"])), options.rows)
    dtype = torch.bfloat16 if is_bf16 and is_lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(prepared["model_folder"], dtype=dtype)
    settings = SFTConfig(
        output_dir=str(options.out) + ".trl",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=1,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=is_bf16,
        max_length=options.sequence_length,
        packing=options.packing,
        completion_only_loss=True,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        seed=0,
    )

    class Clock(TrainerCallback):
        """One line a step: its loss, its tokens and the time at which it ended."""

        def __init__(self) -> None:
            self.tokens = 0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if logs and "loss" in logs:
                tokens = int(state.num_input_tokens_seen or logs.get("num_tokens") or 0)
                line = {"loss": float(logs["loss"]), "tokens": tokens - self.tokens, "time": time.time()}
                self.tokens = tokens
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(prepared["model_folder"]),
        peft_config=LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear") if is_lora else None,
        callbacks=[Clock()],
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(prog="fleetune.bench.trl_run")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("--steps", "--batch", "--rows", "--rank", "--sequence-length", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--packing", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
