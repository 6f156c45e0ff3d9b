from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from fleetune.parallel.store import bind
from fleetune.parallel.world import Place, World
from fleetune.spec.layout import Layout
from parallel import cases
from parallel.ranks import Ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_hears_what_all_have_said(ranks: Ranks, world_size: int) -> None:
    answers = ranks.run(cases.talk, world_size)
    for rank, answer in enumerate(answers):
        assert answer["rank"] == rank
        assert answer["share"] == [rank, world_size]
        assert answer["sum"][:2] == [world_size, sum(range(world_size))]
        assert answer["max"] == [world_size - 1, 0]
        assert answer["any"] == [True, False]
        assert answer["broadcast"] == {"von": "0", "ä": [1, None]}
        assert answer["gather"] == [{"rank": other, "long": "ü" * (1 + 1000 * other)} for other in range(world_size)]
        assert (answer["bytes"] > 0) == (world_size > 1)


def test_a_share_that_several_ranks_have_counts_once(ranks: Ranks) -> None:
    for rank, answer in enumerate(ranks.run(cases.in_layouts, 2)):
        axes = ["pipeline", "replicate", "shard", "tensor"]
        for number, axis in enumerate(axes):
            shared = axis in ("pipeline", "tensor")
            said = answer[f"{axis} 2"]
            assert said["share"] == ([0, 1] if shared else [rank, 2])
            assert said["shares"] == ([1.0, 10.0] if shared else [2.0, 21.0])
            place = [0, 0, 0, 0]
            place[number] = rank
            assert said["mesh"] == [axes, [2 if other == axis else 1 for other in axes], place]


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="shard 2 is no layout of 1 processes"):
        World(Place(), torch.device("cpu"), Layout(shard=2))


def test_counts_are_summed_exactly(ranks: Ranks) -> None:
    assert all(answer["sum"][2] == 2**53 for answer in ranks.run(cases.talk, 2))


def test_a_barrier_waits_for_the_last_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(cases.barrier_waits, 2, str(tmp_path)) == [True, True]


def test_ranks_on_one_machine_listen_on_loopback_only(ranks: Ranks) -> None:
    for addresses in ranks.run(cases.listening_addresses, 2):
        assert addresses, "gloo has no listening socket: the test looks at the wrong place"
        assert set(addresses) <= {"127.0.0.1", "::1"}


@pytest.mark.claim(
    "H33",
    command="fleetune train",
    seen="a rank whose peer is gone says so and ends",
)
def test_a_rank_hears_of_a_killed_peer_and_can_leave(ranks: Ranks) -> None:
    answer = ranks.run(cases.peer_dies, 2, dying=1)[0]
    assert answer["heard"], "a collective with a dead peer returned as if nothing had happened"
    assert answer["noticed_s"] < 5
    assert answer["left_s"] < 6


def test_a_world_of_one_starts_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = World.join(attempt=3)
    assert (world.rank, world.world_size, world.data_rank, world.data_ranks) == (0, 1, 0, 1)
    assert world.gather_json({"a": 1}) == [{"a": 1}]
    assert world.sum([2, 3.5]) == [2, 3.5]
    assert world.any(True) and not world.any(False)
    world.barrier()
    assert not dist.is_initialized()
    assert world.bytes_sent == 0
    world.leave()


@pytest.mark.claim(
    "H11",
    command=(
        "python -m torch.distributed.run --nnodes=2 --nproc_per_node=4 --rdzv_id=12345 --rdzv_backend=c10d "
        "--rdzv_endpoint=node1:29500 train_distributed.py"
    ),
    seen="gloo between CPU processes",
)
@pytest.mark.claim(
    "H32",
    command="torchrun --node_rank",
    seen="under torchrun its own node ranks count",
)
def test_ranks_of_a_persons_own_torchrun_find_each_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom pathlib import Path\nfrom fleetune.parallel.world import World\n"
        "world = World.join()\nPath(f'rank-{world.rank}').write_text(str(world.sum([1, world.rank])))\nworld.leave()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.read_text() for path in tmp_path.glob("rank-*")} == {"[2.0, 1.0]"}
    assert len(list(tmp_path.glob("rank-*"))) == 2


@pytest.mark.claim(
    "H14",
    command="fleetune train",
    seen="no port is opened on every interface",
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_the_store_refuses_to_listen_on_every_interface(host: str) -> None:
    with pytest.raises(ValueError, match="every interface"):
        bind(host)


@pytest.mark.claim(
    "H13",
    command="fleetune train",
    seen="the store listens on the address it was told, and on no other",
)
def test_the_store_listens_where_it_was_told(ranks: Ranks) -> None:
    connections = psutil.Process(ranks.store_pid).net_connections("inet")
    assert [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN] == ["127.0.0.1"]
