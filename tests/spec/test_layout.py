from __future__ import annotations

import itertools

import pytest

from fleetune.spec.errors import UserError
from fleetune.spec.layout import Coordinates, Layout, derive_layout

LAYOUTS = [Layout(*sizes) for sizes in itertools.product((1, 2, 3), repeat=4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_every_rank_has_a_place_of_its_own(layout):
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    order = [(at.pipeline, at.replicate, at.shard, at.tensor) for at in places]
    assert order == sorted(order), "pipeline is outermost, then replicate, shard, and tensor innermost"


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_each_share_of_a_step_has_one_rank_that_speaks_for_it(layout):
    shares = [layout.data_rank(rank) for rank in range(layout.world_size)]
    assert sorted(set(shares)) == list(range(layout.data_ranks))
    speaking = [layout.data_rank(rank) for rank in range(layout.world_size) if layout.speaks(rank)]
    assert sorted(speaking) == list(range(layout.data_ranks))


def test_tensor_peers_are_neighbours_and_have_the_same_share():
    layout = Layout(replicate=2, shard=2, tensor=3, pipeline=2)
    assert layout.coordinates(0) == Coordinates(0, 0, 0, 0) and layout.coordinates(23) == Coordinates(1, 1, 1, 2)
    assert [layout.data_rank(rank) for rank in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [layout.data_rank(rank) for rank in range(12, 24)] == [layout.data_rank(rank) for rank in range(12)]


def test_a_rank_outside_the_layout_is_an_error():
    with pytest.raises(ValueError, match="rank 4 is not one of the 4 of replicate 2 × shard 2"):
        Layout(replicate=2, shard=2).coordinates(4)


@pytest.mark.parametrize(
    ("asked", "processes", "layout"),
    [
        ({}, 1, Layout()),
        ({}, 5, Layout(replicate=5)),
        ({"shard": 4}, 4, Layout(shard=4)),
        ({"shard": 2}, 8, Layout(replicate=4, shard=2)),
        ({"shard": 2, "tensor": 2}, 8, Layout(replicate=2, shard=2, tensor=2)),
        ({"replicate": 2, "shard": 2, "tensor": 2, "pipeline": 2}, 16, Layout(2, 2, 2, 2)),
        ({"replicate": None, "tensor": 3}, 3, Layout(tensor=3)),
    ],
)
def test_what_is_left_open_is_filled_by_replicas(asked, processes, layout):
    assert derive_layout(asked, processes) == layout


@pytest.mark.parametrize(
    ("asked", "processes", "says"),
    [
        (
            {"shard": 3},
            4,
            "shard 3 needs a multiple of 3 processes, and there are 4 processes: give --gpus 6, or a --shard",
        ),
        ({"shard": 2, "tensor": 2}, 6, "shard 2 × tensor 2 needs a multiple of 4 processes, and there are 6 processes"),
        ({"tensor": 2}, 1, "tensor 2 needs a multiple of 2 processes, and there is 1 process: give --gpus 2"),
        ({"replicate": 2, "shard": 2}, 2, "replicate 2 × shard 2 needs 4 processes, and there are 2 processes: give --gpus 4"),
        (
            {"replicate": 1},
            2,
            "replicate 1 needs 1 process, and there are 2 processes: give --gpus 1, or leave",
        ),
    ],
)
def test_numbers_that_collide_are_named_with_a_fix(asked, processes, says):
    with pytest.raises(UserError) as error:
        derive_layout(asked, processes)
    assert str(error.value).startswith(says)
