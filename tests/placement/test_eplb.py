"""EPLB as published: the example of its README, and each of its steps on problems small enough to do by hand."""

import numpy as np
import pytest

from engine.errors import InputError
from engine.placement.replication.eplb import eplb
from engine.validate.replication import check_replication

EXAMPLE = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]],
    dtype=float,
)


def test_the_published_example():
    placed = eplb(EXAMPLE, slots=16, gpus=8, nodes=2, groups=4)
    assert placed.dtype == np.int64
    assert placed.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert check_replication(placed, EXAMPLE[None], 8)[0] == pytest.approx([0.828, 0.805], abs=5e-4)


def test_layers_do_not_depend_on_each_other():
    rng = np.random.default_rng(0)
    load = rng.integers(0, 50, (6, 24)).astype(float)
    together = eplb(load, 32, 8, 4, 8)
    alone = [eplb(load[[layer]], 32, 8, 4, 8)[0].tolist() for layer in range(6)]
    assert together.tolist() == alone


def test_packing_takes_the_heaviest_first_to_the_lightest_gpu_with_room():
    # 9 to GPU 0; 8 to GPU 1, which stays the lighter one and takes 2 as well and is full; 1 goes to GPU 0.
    assert eplb(np.array([[9.0, 8, 2, 1]]), 4, 2).tolist() == [[0, 3, 1, 2]]


def test_ties_go_to_the_lower_index():
    assert eplb(np.ones((1, 4)), 4, 2).tolist() == [[0, 2, 1, 3]]
    # The spare slots go to experts 0 and 1; experts 2 and 3, now heaviest, come first. Nothing keeps replicas apart.
    assert eplb(np.ones((1, 4)), 6, 2).tolist() == [[2, 0, 0, 3, 1, 1]]
    # One slot to a GPU: replicas stay in the order in which they are made, the further ones last.
    assert eplb(np.array([[1.0, 5, 1]]), 4, 4).tolist() == [[0, 1, 2, 1]]


def test_replicas_go_to_whoever_has_the_heaviest():
    placed = eplb(np.array([[12.0, 5, 3, 1]]), 8, 4)
    assert np.bincount(placed[0]).tolist() == [4, 2, 1, 1]  # 12, 6, 5, 4: each is halved and so on in turn


def test_groups_stay_on_a_node_while_nodes_divide_them():
    rng = np.random.default_rng(1)
    load = rng.random((5, 16))
    grouped = eplb(load, 24, 8, nodes=2, groups=4).reshape(5, 2, 12) // 4
    for layer in grouped:
        assert not set(layer[0]) & set(layer[1])
    # 3 groups on 2 nodes: no policy keeps them together, so neither number has any effect.
    load = rng.random((5, 15))
    assert eplb(load, 24, 8, nodes=2, groups=3).tolist() == eplb(load, 24, 8).tolist()


def test_the_unit_of_the_load_changes_nothing():
    load = np.random.default_rng(2).integers(0, 1000, (4, 16)).astype(float)
    placed = eplb(load, 24, 8).tolist()
    assert eplb(load * 2.0**200, 24, 8).tolist() == placed
    assert eplb(load * 2.0**-300, 24, 8).tolist() == placed
    assert eplb(np.zeros((1, 4)), 8, 2).shape == (1, 8)


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"slots": 8}, ["8 slots for 12 experts", "16"]),
        ({"slots": 17}, ["17 slots", "8 GPUs", "16 or 24"]),
        ({"slots": 9}, ["9 slots", "take 16"]),
        ({"gpus": 0}, ["gpus", "at least 1"]),
        ({"nodes": 3}, ["8 GPUs", "3 nodes", "1, 2, 4 or 8"]),
        ({"groups": 5}, ["12 experts", "5 groups", "1, 2, 3, 4, 6 or 12"]),
        ({"load": np.ones(12)}, ["load"]),
        ({"load": -EXAMPLE}, ["load"]),
        ({"load": EXAMPLE * np.nan}, ["load"]),
    ],
)
def test_bad_input_says_what_would_do(more, parts):
    with pytest.raises(InputError) as error:
        eplb(**({"load": EXAMPLE, "slots": 16, "gpus": 8, "nodes": 2, "groups": 4} | more))
    for part in parts:
        assert part in str(error.value)
