"""Weights as int8 or 4-bit NormalFloat and back, by bitsandbytes. The one file that imports it.

Quantising happens once, on the CPU, so that every device and every process of a run computes with the same base.
Weights are `[out, in]`. The parts that a weight becomes, by scheme:

- int8: `codes` int8 [out, in]; `scales` fp32 [out], the largest value of each row. W = codes * scales / 127.
- nf4: `codes` uint8 [n / 2, 1], two weights a byte; `scales` uint8 [b], one for each 64 weights, themselves codes of
  bitsandbytes' 8-bit map; `nested_scales` fp32 [b / 256, rounded up]; `offset` fp32 scalar.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

import torch

from fleetune.spec.errors import UserError
from fleetune.spec.quantized import NF4_BLOCK, NF4_NESTED_BLOCK

#: Names of the parts of a weight, by scheme.
PARTS: dict[str, tuple[str, ...]] = {
    "int8": ("codes", "scales"),
    "nf4": ("codes", "scales", "nested_scales", "offset"),
}
_LARGEST_FP16 = 65504.0


@cache
def _library() -> Any:
    """bitsandbytes' functions. Raises UserError naming the extra where it is not installed."""
    absent = "kernels" not in sys.modules
    if absent:
        # At its import it asks the package `kernels`, where there is one, for code from a hub. Nothing is fetched here.
        sys.modules["kernels"] = None  # type: ignore[assignment]
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional as functional
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise UserError(
            "a quantised base needs the package bitsandbytes, which is not installed here: pip install 'fleetune[quant]', or "
            "leave --quantize out"
        ) from None
    finally:
        log.setLevel(level)
        if absent:
            del sys.modules["kernels"]
    return functional


def quantize(weight: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
    """The parts of a floating-point weight [out, in] on the CPU. Raises UserError for values that int8 cannot hold."""
    functional = _library()
    weight = weight.contiguous()
    if scheme == "int8":
        if float(weight.abs().max()) > _LARGEST_FP16:
            raise UserError(f"it holds {float(weight.abs().max()):.3g}, and int8's rows end at {_LARGEST_FP16:g}: use nf4")
        codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        codes[scales == 0] = 0  # a row of zeros was divided by its largest value
        return {"codes": codes, "scales": scales}
    codes, state = functional.quantize_4bit(weight, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4")
    if state.state2.blocksize != NF4_NESTED_BLOCK:
        raise RuntimeError(f"bitsandbytes nests scales in blocks of {state.state2.blocksize}, not {NF4_NESTED_BLOCK}")
    return {
        "codes": codes,
        "scales": state.absmax,
        "nested_scales": state.state2.absmax,
        "offset": state.offset.reshape(()),
    }


def dequantize(parts: dict[str, torch.Tensor], shape: tuple[int, int], scheme: str, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] in `dtype`, on the parts' device; each value computed in fp32 and rounded once."""
    if scheme == "int8":
        scales = parts["scales"].mul(1.0 / 127.0)  # the very factor that bitsandbytes multiplies with
        return parts["codes"].to(dtype).mul_(scales[:, None])
    functional = _library()
    count = shape[0] * shape[1]
    device = parts["codes"].device
    nested = functional.QuantState(
        absmax=parts["nested_scales"], code=_map_of_scales(device), blocksize=NF4_NESTED_BLOCK, dtype=torch.float32
    )
    # The AVX512 kernel of bitsandbytes 0.50 takes each row's scales from the row's own start: wrong wherever a row is not a
    # whole number of blocks. Given as rows of one block each (or as one row), the same bytes come out right.
    state = functional.QuantState(
        absmax=parts["scales"],
        shape=(count // NF4_BLOCK, NF4_BLOCK) if count % NF4_BLOCK == 0 else (1, count),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=parts["offset"],
        state2=nested,
    )
    return functional.dequantize_4bit(parts["codes"], state).reshape(shape)


@cache
def _map_of_scales(device: torch.device) -> torch.Tensor:
    """fp32 [256]: what the codes of nested scales stand for."""
    return _library().create_dynamic_map().to(device)
