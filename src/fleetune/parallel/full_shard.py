"""torch's FSDP2 around a model: which modules it puts together, in which dtypes, and what its traffic amounts to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from fleetune.parallel.world import World

if TYPE_CHECKING:
    from fleetune.models.causal import CausalModel


class Root(nn.Module):
    """What FSDP sees as the whole model: it calls whatever runs the model, with embedding and head in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()

    def all_parts(self) -> list[FSDPModule]:
        """Everything that FSDP puts together on its own: the blocks, and what stands outside them."""
        return [module for module in self.modules() if isinstance(module, FSDPModule)]

    def let_go(self) -> None:
        """Free whatever is put together, so that nothing of it is older than the pieces."""
        for part in self.all_parts():
            part.reshard()


def shard_fully(model: CausalModel, world: World) -> Root:
    """Cut every parameter (on the meta device) over the shard ranks. All ranks.

    Gradients are summed, never averaged. Masters are gathered in the dtype of the forward, which is half the bytes, and their
    gradients are summed in fp32. What stands outside the blocks stays fp32, so that the residual stream is as wide as it is
    under autocast with one process.
    """
    axes = ("replicate", "shard") if world.layout.replicate > 1 else ("shard",)
    mesh = world.mesh[axes]
    trains_base = any(p.requires_grad for p in model.module.get_submodule(model.anatomy.embedding).parameters())
    narrow = model.compute_dtype if trains_base and model.compute_dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for name in model.anatomy.block_names():
        fully_shard(model.module.get_submodule(name), mesh=mesh, mp_policy=policy)
    root = Root(model.module)
    fully_shard(root, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for part in root.all_parts():
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        part.set_custom_all_gather(_AllGather(world))
        part.set_custom_reduce_scatter(_ReduceScatter(world))
        if world.layout.replicate > 1:
            part.set_all_reduce_hook(world.count_sent)
    return root


def allocate(root: Root, tied: list[tuple[str, ...]], device: torch.device) -> None:
    """Memory for this rank's pieces, not yet filled; what was one parameter is one again. tied: names of each such one."""
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for first, *others in tied:
        parameter = root.model.get_parameter(first)
        for name in others:
            path, _, leaf = name.rpartition(".")
            root.model.get_submodule(path)._parameters[leaf] = parameter


class _AllGather(DefaultAllGather):
    """torch's own, counted."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if group.size() > 1:
            self._world.count_sent(input_tensor)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    """torch's own, counted."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if group.size() > 1:
            self._world.count_sent(input_tensor)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
