"""How fast matrix products alone could be: `python -m fleetune.bench.matmul_limit MODEL_FOLDER ...`, one process of the run.

It times the products that one token's forward and backward cannot do without, at the model's own shapes, in the type that
the run computes in. Nothing else of a training step is in it: no attention, no norms, no optimizer.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from fleetune.spec.model_shape import read_shape

#: Rows of each product: tokens of one micro-batch.
ROWS = 1024
_SECONDS = 4.0


def products_of(folder: Path, *, method: str, trained_share: float) -> list[tuple[int, int, float]]:
    """(inputs, outputs, how often per token) of the linear layers. A frozen linear is two products a token (forward, and the
    gradient of its input), a trained one three; the head counts for the trained share of the tokens alone."""
    shape = read_shape(folder)
    times = 2.0 if method == "lora" else 3.0
    found = [(linear.num_in, linear.num_out, times) for linear in shape.linears]
    return [*found, (shape.hidden_size, shape.vocab_size, times * trained_share)]


def flops_per_token(products: list[tuple[int, int, float]]) -> float:
    """One multiplication and one addition per weight and product."""
    return sum(2.0 * num_in * num_out * times for num_in, num_out, times in products)


def seconds_per_token(products: list[tuple[int, int, float]], *, precision: str) -> float:
    """Measured: the time of every different product, times how often a token needs it."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    sizes = {(num_in, num_out) for num_in, num_out, _ in products}
    cost = {}
    for num_in, num_out in sizes:
        rows, weight = torch.randn(ROWS, num_in, dtype=dtype), torch.randn(num_out, num_in, dtype=dtype)
        product = lambda: torch.nn.functional.linear(rows, weight)  # noqa: B023, E731 - called here and now
        product()
        count, began = 0, time.perf_counter()
        while count < 3 or time.perf_counter() - began < _SECONDS / len(sizes):
            product()
            count += 1
        cost[num_in, num_out] = (time.perf_counter() - began) / count / ROWS
    return sum(cost[num_in, num_out] * times for num_in, num_out, times in products)


def main() -> None:
    parser = argparse.ArgumentParser(prog="fleetune.bench.matmul_limit")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--method", required=True)
    parser.add_argument("--trained-share", type=float, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    products = products_of(options.folder, method=options.method, trained_share=options.trained_share)
    seconds = seconds_per_token(products, precision=options.precision)
    print(json.dumps({"tokens_per_s": 1 / seconds, "flops_per_s": flops_per_token(products) / seconds}))


if __name__ == "__main__":
    main()
