"""`solve travel`: JSON in, JSON out."""

import pytest

GOOD = {
    "experts": [[0, 2, 3], [1, 3, -1]],
    "source_gpu": [1, 2],
    "gpu_of_expert": [0, 1, 2, 3],
    "gpus": 4,
    "gpus_per_node": 2,
}


@pytest.mark.parametrize(
    ("travel", "fabric", "links", "most"),
    [
        ("copies", {(1, 2): 1, (1, 3): 1, (2, 1): 1}, {(1, 0): 1, (2, 3): 1}, 2),
        ("gpu", {(1, 2): 1, (1, 3): 1, (2, 1): 1}, {(1, 0): 1, (2, 3): 1}, 2),
        # GPU 1 is the second of its node and enters the other at GPU 3; GPU 2 the first, and enters at GPU 0
        ("node", {(1, 3): 1, (2, 0): 1}, {(1, 0): 1, (3, 2): 1, (0, 1): 1, (2, 3): 1}, 1),
    ],
)
def test_by_hand(solver, travel, fabric, links, most):
    answer = solver.answer("travel", GOOD | {"travel": travel})
    assert set(answer) == {"status", "objective", "bound", "runtime", "fabric", "links"}
    for name, wanted in (("fabric", fabric), ("links", links)):
        rows = answer[name]
        assert {(a, b): rows[a][b] for a in range(4) for b in range(4) if rows[a][b]} == wanted, name
    assert (answer["status"], answer["objective"], answer["bound"]) == ("OPTIMAL", most, most)


def test_experts_of_one_gpu_share_a_row(solver):
    problem = GOOD | {"gpu_of_expert": [2, 2, 2, 2], "source_gpu": [0, 0]}
    rows = [solver.answer("travel", problem | {"travel": travel})["objective"] for travel in ("copies", "gpu", "node")]
    assert rows == [5, 2, 2]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"experts": [[0, 1], [2]]}, "same number of choices"),
        ({"experts": [[0, 1, 4], [1, 2, 3]]}, "experts must lie in -1 … 3"),
        ({"source_gpu": [0]}, "1 entries for 2 tokens"),
        ({"source_gpu": [0, 4]}, "source_gpu must lie in 0 … 3"),
        ({"gpu_of_expert": [0, 1, 2, 4]}, "gpu_of_expert must lie in 0 … 3"),
        ({"gpus_per_node": 3}, "4 GPUs do not divide into nodes of 3"),
        ({"travel": "rail"}, "travel"),
    ],
)
def test_wrong_input_is_one_line(solver, parts, reason):
    solver.refused("travel", GOOD | {"travel": "node"} | parts, reason)
