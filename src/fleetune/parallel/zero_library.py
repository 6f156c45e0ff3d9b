"""DeepSpeed itself, and only here: how it is started inside our process group, and how its engine is made.

Everything it would do on its own that is already done, or done otherwise here, is turned off: its launcher and discovery of
ranks, a kernel for inference that it would compile for minutes, and sending every weight from rank 0 to all others.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from fleetune.parallel.world import World
from fleetune.spec.errors import UserError

#: Methods of DeepSpeed's communication backend, and the argument that a rank gives away in each.
_COLLECTIVES = {
    "all_reduce": 0,
    "all_reduce_coalesced": 0,
    "reduce": 0,
    "broadcast": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_gather_coalesced": 1,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
}


@final
class Traffic:
    """Bytes that this rank has given to DeepSpeed's collectives."""

    def __init__(self) -> None:
        self.bytes_sent = 0

    def watch(self, backend: Any) -> None:
        """Count what goes through a backend from now on."""
        for name, position in _COLLECTIVES.items():
            setattr(backend, name, self._counted(getattr(backend, name), position))

    def _counted(self, collective: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[position] if len(args) > position else _given(kwargs)
            self.bytes_sent += _bytes(given)
            return collective(*args, **kwargs)

        return call


def start(world: World) -> Traffic:
    """Import DeepSpeed and let it work in our process group, which a world of one gets here. Raises UserError without it."""
    os.environ["DS_ACCELERATOR"] = world.device.type
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"engine deepspeed needs the package deepspeed, which cannot be imported here ({error}): pip install "
            "'fleetune[deepspeed]', or leave the engine out"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls collectives by names that torch is about to change; a line of each step's each call says so.
    warnings.filterwarnings("ignore", message=".*_tensor` is deprecated", category=FutureWarning)
    from deepspeed.comm import comm

    # On a CPU it would compile, for most of a minute, an all-reduce that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    comm.init_distributed()
    traffic = Traffic()
    traffic.watch(comm.cdb)
    return traffic


def split_parameters(module: nn.Module, config: Mapping[str, Any]) -> None:
    """ZeRO-3: keep this rank's piece of each parameter and let go of the rest, one parameter after the other."""
    from deepspeed.runtime.zero.partition_parameters import Init

    class Split(Init):  # type: ignore[misc]
        """All ranks have read the same weights: nothing is sent, which would also copy what is memory-mapped."""

        def _zero_init_param(self, parameter: nn.Parameter) -> None:
            self._convert_to_deepspeed_param(parameter)
            parameter.partition()

    Split(module=module, config_dict_or_path=dict(config))


def make_engine(
    module: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], config: Mapping[str, Any]
) -> Any:
    """DeepSpeed's engine over a module whose weights are the same on all ranks. All ranks."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    class Engine(DeepSpeedEngine):  # type: ignore[misc]
        """All ranks have read the same weights: nothing is sent, which would also copy what is memory-mapped."""

        def _broadcast_model(self) -> None:
            pass

    return Engine(
        args=None,
        model=module,
        optimizer=optimizer,
        model_parameters=list(parameters),
        config=dict(config),
        config_class=DeepSpeedConfig(dict(config)),
        dont_change_device=True,
    )


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """The fp32 values of a trained parameter that ZeRO-3 keeps in pieces. All ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    full: torch.Tensor = safe_get_full_fp32_param(parameter)
    return full


def cpu_adam(groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for optimizer states in host memory, with the groups and numbers of a torch AdamW. It is compiled at
    its first use, which takes a minute or two."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kept = [{name: group[name] for name in ("params", "weight_decay", "betas", "eps")} for group in groups]
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(kept, lr=0.0, adamw_mode=True)
    return made


def _given(arguments: Mapping[str, Any]) -> Any:
    for name in ("input_tensor", "input_tensors", "input_list", "tensor", "tensors"):
        if name in arguments:
            return arguments[name]
    return None


def _bytes(given: Any) -> int:
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(_bytes(part) for part in given) if isinstance(given, (list, tuple)) else 0
