"""What DeepSpeed is told, from what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetune.parallel.loss_scale import Scaling
from fleetune.parallel.native import StepSettings


@dataclass(frozen=True)
class ZeroSettings:
    """stage: 0 to 3. offload: what is kept in host memory: none, optimizer, or parameters (and optimizer; stage 3 only).

    cpu_adam: update with DeepSpeed's own AdamW for host memory. options: more of DeepSpeed's settings, by its own names.
    """

    stage: int
    offload: str = "none"
    cpu_adam: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def deepspeed_config(zero: ZeroSettings, settings: StepSettings, *, world_size: int) -> dict[str, Any]:
    """What DeepSpeed is told. The division of a step, the precision and the learning rate are ours: it gets neutral values."""
    options = {name: value for name, value in zero.options.items() if name != "fp16"}
    partition = {**options.pop("zero_optimization", {}), "stage": zero.stage}
    if zero.offload != "none":
        partition["offload_optimizer"] = {"device": "cpu", **_extra(partition, "offload_optimizer")}
    if zero.offload == "parameters":
        partition["offload_param"] = {"device": "cpu", **_extra(partition, "offload_param")}
    return {
        "steps_per_print": 1 << 62,
        **options,
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.gradient_clip if zero.stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": partition,
    }


def scaling_of(fp16: Mapping[str, Any]) -> Scaling:
    """The loss scaling that DeepSpeed's section `fp16` asks for; a loss_scale of 0 is one that moves."""
    known = Scaling()
    fixed = float(fp16.get("loss_scale", 0))
    return Scaling(
        start=fixed or 2.0 ** float(fp16.get("initial_scale_power", 16)),
        lowest=float(fp16.get("min_loss_scale", known.lowest)),
        growth_steps=int(fp16.get("loss_scale_window", known.growth_steps)),
        is_fixed=fixed > 0,
    )


def _extra(partition: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: value for key, value in (partition.get(section) or {}).items() if key != "device"}
