"""`TuringLightningModule` under a person's own Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="the extra lightning is not installed here")

#: Whole programs, many times over: too long for every change.
pytestmark = pytest.mark.long

SCRIPT = """
import sys
import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from fleetune.bridges.xturing.models import create_model
from fleetune.bridges.xturing.trainers.lightning_trainer import TuringLightningModule


class Losses(pl.Callback):
    seen = []
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.seen.append(float(trainer.callback_metrics["loss"]))

kind, model, data, out = sys.argv[1:]
strategy = {
    "alone": "auto",
    "ddp": DDPStrategy(process_group_backend="gloo") if kind == "ddp" else None,
    "sharded": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    if kind == "sharded" else None,
}
chosen = create_model("llama2_lora", model)
chosen.finetuning_config().max_length = 64
chosen.finetuning_config().lora_dropout = 0.0
module = TuringLightningModule(
    chosen, data, batch_size=2 if kind == "alone" else 1, learning_rate=1e-2, optimizer_name="adamw", saved_path=out
)
if kind == "deepspeed":
    try:
        refused = pl.Trainer(
            strategy=DeepSpeedStrategy(stage=2, offload_optimizer=True, offload_parameters=False),
            accelerator="cpu", devices=2, precision=16,
        )
        refused.fit(module)
    except Exception as refusal:
        print("REFUSED", type(refusal).__name__, refusal)
        sys.exit(0)
losses = Losses()
trainer = pl.Trainer(
    strategy=strategy[kind], accelerator="cpu", devices=1 if kind == "alone" else 2, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[losses],
    use_distributed_sampler=False, precision="32-true",
)
trainer.fit(module)
if trainer.is_global_zero:
    print("LOSSES", losses.seen)
"""


def run(kind: str, model: Path, folder: Path) -> str:
    rows = [{"instruction": f"Count {n}.", "text": "", "target": f"{n} clips"} for n in range(96)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "script.py").write_text(SCRIPT)
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "script.py", kind, str(model), "rows.jsonl", str(folder / f"out-{kind}")],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(source),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses_of(out: str) -> list[float]:
    (line,) = [line for line in out.splitlines() if line.startswith("LOSSES ")]
    return json.loads(line.removeprefix("LOSSES "))


@pytest.mark.claim(
    "X19",
    command='pl.Trainer(...).fit(TuringLightningModule(create_model("llama2_lora"), dataset))',
    seen="trains under a person's own Trainer; the saved adapter is PEFT's",
)
@pytest.mark.claim(
    "X6",
    command="from fleetune.bridges.xturing.trainers.lightning_trainer import TuringLightningModule",
    seen="the module under that path",
)
def test_it_trains_and_saves_what_peft_loads(tiny_llama, tmp_path):
    losses = losses_of(run("alone", tiny_llama, tmp_path))
    assert losses[-1] < losses[0] - 0.3
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in (tmp_path / "out-alone").iterdir()}


@pytest.mark.long
@pytest.mark.claim(
    "X5",
    command="pl.Trainer(strategy=DDPStrategy(...) | ModelParallelStrategy(...))",
    seen="ddp and ModelParallelStrategy on two CPU processes have the losses of one",
)
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_two_processes_have_the_losses_of_one(kind, tiny_llama, tmp_path):
    alone = losses_of(run("alone", tiny_llama, tmp_path))
    both = losses_of(run(kind, tiny_llama, tmp_path))
    assert both[:4] == pytest.approx(alone[:4], rel=1e-3)
    assert both == pytest.approx(alone, rel=2e-2), "a base in low precision drifts a little"
    assert (tmp_path / f"out-{kind}" / "adapter_model.safetensors").is_file()


def test_deepspeed_without_a_gpu_is_refused_by_lightning_itself_and_our_page_says_so(tiny_llama, tmp_path):
    import torch

    from fleetune.bridges.xturing.trainers import lightning_trainer

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "REFUSED" in run("deepspeed", tiny_llama, tmp_path)
    assert "Lightning itself refuses them" in (lightning_trainer.__doc__ or "")
