"""What is asked of DeepSpeed."""

from __future__ import annotations

from typing import Literal

from fleetune.spec.section import Section, declare


class ZeroSection(Section):
    """DeepSpeed, and how it shares out the training state."""

    engine: Literal["auto", "native", "deepspeed"] = declare(
        "auto",
        "What keeps the training state. auto: DeepSpeed where a setting asks for it, else fleetune's own engines.",
        resume=True,
    )

    use_deepspeed: bool = declare(False, "Let DeepSpeed keep the training state: the same as --engine deepspeed.", resume=True)
    deepspeed: str | None = declare(
        None,
        "DeepSpeed's own JSON file, taken as it is. What it says must agree with flags; what has no effect is named.",
        aliases=("deepspeed_config", "deepspeed_config_path"),
        resume=True,
    )
    zero_stage: int | None = declare(
        None,
        "What ranks share out: nothing (0), the optimizer's state (1), gradients too (2), parameters too (3). Empty: 2, or "
        "what the file of --deepspeed says.",
        ge=0,
        le=3,
        resume=True,
    )
    offload: Literal["none", "optimizer", "parameters"] = declare(
        "none",
        "What is kept in host memory. parameters includes the optimizer's state, and needs --zero-stage 3.",
        resume=True,
    )
