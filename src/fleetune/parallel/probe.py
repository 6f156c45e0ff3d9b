"""One rank on every node that meets the others as training would, and names who cannot be met.

First each pair of nodes for itself, so that a broken way is named; then all together, with what carries the gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from fleetune.parallel.world import connect

_PAIR_S = 6.0
_ALL_S = 15.0
#: 4 MiB of fp32: enough to be more than a handshake.
_NUM_ELEMENTS = 1 << 20


def main(arguments: list[str]) -> int:
    """Tells `{"pairs", "all_reduce_s", "error", "done"}` as one line of JSON on the report pipe."""
    parser = argparse.ArgumentParser(prog="fleetune.parallel.probe")
    parser.add_argument("--store", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--report-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    store = connect(options.store, timedelta(seconds=_ALL_S))
    pairs = {}
    for first, second in rounds(options.num_nodes, options.node):
        problem = try_pair(store, first, second, options.node)
        if problem is not None:
            pairs[f"{first}-{second}"] = problem
    row: dict[str, object] = {"pairs": pairs}
    if not pairs:
        row |= try_all(store, options)
    os.write(options.report_fd, json.dumps({**row, "done": True}).encode() + b"\n")
    return 0


def rounds(num_nodes: int, node: int) -> Iterator[tuple[int, int]]:
    """The pairs of one node, in an order in which all nodes are busy with each other at the same time (a round robin)."""
    places = [*range(num_nodes), *([-1] if num_nodes % 2 else [])]
    for _ in range(len(places) - 1):
        for left, right in zip(places, reversed(places)):
            if node in (left, right) and left != right and -1 not in (left, right):
                yield min(left, right), max(left, right)
                break
        places = [places[0], places[-1], *places[1:-1]]


def try_pair(store: dist.Store, first: int, second: int, node: int) -> str | None:
    """One sum over two nodes with gloo; None where it works, else what went wrong."""
    try:
        group = dist.ProcessGroupGloo(
            dist.PrefixStore(f"pair-{first}-{second}", store), int(node == second), 2, timedelta(seconds=_PAIR_S)
        )
        numbers = torch.ones(8)
        group.allreduce([numbers]).wait()
    except RuntimeError as error:
        return str(error).splitlines()[0][:300]
    return None if float(numbers[0]) == 2.0 else f"the sum of two ones was {float(numbers[0])}"


def try_all(store: dist.Store, options: argparse.Namespace) -> dict[str, object]:
    """One sum over all nodes, on the device that will train."""
    backend = "nccl" if options.device == "cuda" else "gloo"
    timeout = timedelta(seconds=_ALL_S)
    try:
        dist.init_process_group(
            backend, store=dist.PrefixStore("all", store), rank=options.node, world_size=options.num_nodes, timeout=timeout
        )
        numbers = torch.ones(_NUM_ELEMENTS, device="cuda:0" if options.device == "cuda" else "cpu")
        dist.all_reduce(numbers)  # the first one connects
        began = time.perf_counter()
        numbers.fill_(1.0)
        dist.all_reduce(numbers)
        total = float(numbers[-1])
        seconds = time.perf_counter() - began
        dist.barrier()  # nobody leaves while another still reads
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0][:300]}
    if total != options.num_nodes:
        return {"error": f"the sum of {options.num_nodes} ones was {total}"}
    return {"all_reduce_s": seconds, "all_reduce_bytes": 4 * _NUM_ELEMENTS, "backend": backend}
