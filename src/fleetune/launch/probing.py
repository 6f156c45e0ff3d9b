"""Starting `fleetune.parallel.probe` on this machine: ranks that only meet, add a few numbers, and go."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleetune.launch.addresses import interface_of
from fleetune.launch.child import Call
from fleetune.launch.ending import describe_exit, first_error
from fleetune.launch.lifeline import Lifeline
from fleetune.launch.processes import Process, Reports, Surroundings
from fleetune.launch.request import Launch, environment_of

_POLL_S = 0.05


def run_probe(order: Mapping[str, Any], *, poll: Callable[[], None]) -> dict[str, Any]:
    """Run this node's rank of the probe to its end; what it found, or `{"error"}`. poll: called meanwhile; it may raise.

    order: `store`, `node`, `num_nodes`, `address`, `device`, `seconds` (until it is given up).
    """
    interface = interface_of(order["address"])
    bound = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
    environment, _ = environment_of(Launch(environment=bound, threads=1))
    lifeline = Lifeline()
    reports = Reports()
    words = ("--store", order["store"], "--node", str(order["node"]), "--num-nodes", str(order["num_nodes"]))
    call = Call("fleetune.parallel.probe", (*words, "--device", order["device"]))
    with tempfile.TemporaryDirectory(prefix="fleetune-probe-") as folder:
        log = Path(folder) / "probe.log"
        process = Process(call, log, Surroundings(environment, lifeline), reports=reports)
        reports.started()
        deadline = time.monotonic() + float(order["seconds"])
        found: dict[str, Any] = {}
        try:
            while process.exit_code is None and time.monotonic() < deadline:
                poll()
                time.sleep(_POLL_S)
                for row in reports.take():
                    found |= row
            for row in reports.take():
                found |= row
            code = process.exit_code
            if found.get("done"):
                return found
            if code is None:
                return {**found, "error": f"the test did not end within {order['seconds']:.0f} s"}
            return {**found, "error": first_error(log) or describe_exit(code)}
        finally:
            process.kill()
            process.wait(5.0)
            reports.close()
            lifeline.close()
