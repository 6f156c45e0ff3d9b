"""Which number format a device computes fast enough in: found by timing it, remembered per processor and torch version."""

from __future__ import annotations

import hashlib
import logging
import platform
import re
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fleetune.models.cache import recall, remember
from fleetune.spec.errors import UserError

if TYPE_CHECKING:
    import torch

Precision = Literal["bf16", "fp16", "fp32"]

#: bf16 keeps 8 bits of a number: it must be this much faster than fp32 to be taken.
MARGIN = 1.3
#: Rows, depth and columns of the trial product: about one linear layer of a small model on one sequence.
_SHAPE = (128, 512, 512)
_TRIALS = 7
_MIN_SECONDS = 0.05
#: Without instructions for it bf16 is emulated, tens of times slower: from this ratio on it is not to be used.
_HOPELESS = 4
#: NVIDIA's tensor cores compute in bf16 from Ampere (8.0) on; older ones in fp16 only.
_BF16_CAPABILITY = 8
_log = logging.getLogger(__name__)


def probe_precision(device: str) -> Precision:
    """The number format for the forward and backward pass on `device` (`cpu`, `cuda`, `cuda:0`).

    A CPU is timed once, about 0.1 s; afterwards the answer is remembered, and found without importing torch.
    """
    if device.startswith("cuda"):
        import torch

        major, _ = torch.cuda.get_device_capability(device)
        return "bf16" if major >= _BF16_CAPABILITY else "fp16"
    if device != "cpu":
        return "fp32"
    key = _key()
    known = recall("precision", key)
    if known is not None and known.get("precision") in ("bf16", "fp32"):
        return "bf16" if known["precision"] == "bf16" else "fp32"
    seconds = time_products()
    precision: Precision = "bf16" if seconds["fp32"] > MARGIN * seconds["bf16"] else "fp32"
    _log.info("%s: a product takes %.4f s in fp32, %.4f s in bf16: %s", key, seconds["fp32"], seconds["bf16"], precision)
    remember("precision", key, {"precision": precision, "seconds": seconds})
    return precision


def check_precision(precision: str, device: str) -> None:
    """Whether this machine computes in what another one has chosen. Raises UserError where it would have to emulate it.

    Measurement noise is no reason: what this machine's own probe would have chosen does not matter here.
    """
    if precision != "bf16":
        return
    if device.startswith("cuda"):
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        if major < _BF16_CAPABILITY:
            raise UserError(
                f"the first machine computes in bf16, and this one's {torch.cuda.get_device_name(device)} ({major}.{minor}) "
                "has no tensor cores for it: give --precision fp16"
            )
    elif device == "cpu" and probe_precision(device) != "bf16":
        seconds = time_products()
        if seconds["bf16"] > _HOPELESS * seconds["fp32"]:
            raise UserError(
                f"the first machine computes in bf16, which this one's processor emulates, "
                f"{seconds['bf16'] / seconds['fp32']:.0f} times slower than fp32: give --precision fp32"
            )


def _key() -> str:
    return f"{processor()}, torch {metadata.version('torch')}, {_SHAPE}, {MARGIN}, one core"


def time_products() -> dict[str, float]:
    """Seconds of one matrix product on one core of the CPU by number format: the fastest of several trials, taken in turns.

    The fastest and not the mean: other processes can only make a trial slower. One thread, since two wait for each other,
    and where another process has a core that is what is timed; and long enough to outlast another's turn on this core.
    """
    import torch

    rows, depth, columns = _SHAPE
    formats = {"fp32": torch.float32, "bf16": torch.bfloat16}
    operands = {
        name: (torch.ones(rows, depth, dtype=dtype), torch.ones(depth, columns, dtype=dtype)) for name, dtype in formats.items()
    }
    best = dict.fromkeys(formats, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = time.perf_counter()
        trial = 0
        while trial <= _TRIALS or time.perf_counter() - began < _MIN_SECONDS:
            for name, (left, right) in operands.items():
                seconds = _time(left, right)
                if trial:  # the first one also loads kernels
                    best[name] = min(best[name], seconds)
            trial += 1
    finally:
        torch.set_num_threads(threads)
    return best


def processor() -> str:
    """What tells this CPU from others that compute differently: its name and the instructions it offers."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.processor() or platform.machine()} {platform.platform()}"
    found = {key.strip(): value.strip() for key, value in re.findall(r"^([^:\n]+):(.*)$", text.partition("\n\n")[0], re.M)}
    name = found.get("model name") or found.get("CPU part") or platform.machine()
    instructions = found.get("flags") or found.get("Features") or ""
    return f"{name} {hashlib.sha256(instructions.encode()).hexdigest()[:12]}"


def _time(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    left @ right
    return time.perf_counter() - began
