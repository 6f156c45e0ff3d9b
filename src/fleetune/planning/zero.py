"""Which of DeepSpeed's stages of ZeRO a run asks for: several settings say it, one of them is enough."""

from __future__ import annotations

from dataclasses import dataclass

from fleetune.spec.run_spec import RunSpec

#: Where nobody says: the optimizer's state and the gradients are split, and no forward waits for another rank.
DEFAULT_STAGE = 2


@dataclass(frozen=True)
class Zero:
    """stage: 0 to 3. offload: `none`, `optimizer` (its state in host memory) or `parameters` (those, too)."""

    stage: int
    offload: str


def is_deepspeed(spec: RunSpec) -> bool:
    """Whether DeepSpeed is the engine of a run."""
    return spec.zero.engine == "deepspeed" or (spec.zero.engine == "auto" and bool(asks_for_deepspeed(spec)))


def asks_for_deepspeed(spec: RunSpec) -> list[str]:
    """The settings of a run that only DeepSpeed can honour, as `zero_stage 2`; empty where there are none."""
    zero = spec.zero
    given = {
        "use_deepspeed": zero.use_deepspeed,
        f"deepspeed {zero.deepspeed}": zero.deepspeed is not None,
        f"zero_stage {zero.zero_stage}": zero.zero_stage is not None,
        f"offload {zero.offload}": zero.offload != "none",
    }
    return [text for text, is_given in given.items() if is_given]


def zero_of(spec: RunSpec) -> Zero:
    """What a run under DeepSpeed asks for. A file of DeepSpeed's that names no stage means 0, as it does there."""
    stage, offload = spec.zero.zero_stage, spec.zero.offload
    if stage is None:
        stage = DEFAULT_STAGE if spec.zero.deepspeed is None else 0
    if spec.optimization.optimizer == "cpu_adam" and offload == "none" and stage > 0:
        offload = "optimizer"
    return Zero(stage, offload)
