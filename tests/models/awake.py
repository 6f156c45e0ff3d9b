"""Adapters that do something: a fresh one's second factors are zero, and hide what is wrong with its first."""

from __future__ import annotations

import torch

from fleetune.models.causal import CausalModel


def awake(model: CausalModel) -> CausalModel:
    """The model, with random second factors in its adapter."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.trained():
            if "lora_B" in name:
                parameter.normal_(0, 0.2, generator=generator)
    return model
