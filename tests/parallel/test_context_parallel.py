"""Why there is no context parallelism: torch's own does not take what fleetune trains. When this fails, look again."""

from __future__ import annotations

import pytest

from fleetune.parallel.world import World
from parallel.ranks import Ranks


def attend(world: World) -> str:
    """One causal attention over a sequence that is cut in two; what torch says of it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (world.world_size,))
    sequence = torch.randn(1, 4, 64, 16, generator=torch.Generator().manual_seed(0))
    try:
        with context_parallel(mesh, buffers=[sequence], buffer_seq_dims=[2]):
            torch.nn.functional.scaled_dot_product_attention(sequence, sequence, sequence, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_torch_has_no_ring_attention_for_cpus(ranks: Ranks) -> None:
    assert all("flash_attention_for_cpu" in said for said in ranks.run(attend, 2))
