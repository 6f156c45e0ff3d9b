"""Stands for a library that starts CUDA when it is imported: torch then says so, and forks are forbidden."""

import torch

torch.cuda.is_initialized = lambda: True  # type: ignore[assignment]
