"""`solve affinity`: JSON in, JSON out, every answer held against the rules of its problem."""

import numpy as np
import pytest

from engine.validate.affinity import check_affinity
from tests.placement.affinity_cases import permutation_affinity

KEYS = {"status", "objective", "bound", "runtime", "gpu_of_expert", "node_hops", "gpu_hops"}
GOOD = {"transitions": [[[5, 1, 0, 2], [0, 7, 1, 0], [3, 0, 4, 1], [0, 2, 1, 6]]], "gpus": 2}


def held_against_the_rules(answer: dict, problem: dict) -> None:
    assert set(answer) == KEYS
    cost, node_hops, gpu_hops = check_affinity(
        np.array(answer["gpu_of_expert"]),
        np.array(problem["transitions"], dtype=float),
        problem["gpus"],
        problem.get("gpus_per_node"),
        problem.get("cost_gpu", 1),
        problem.get("cost_node", 1),
    )
    assert answer["objective"] == pytest.approx(cost, rel=1e-9)
    assert (answer["node_hops"], answer["gpu_hops"]) == (pytest.approx(node_hops), pytest.approx(gpu_hops))
    assert answer["bound"] <= answer["objective"] * (1 + 1e-9)
    assert all(type(gpu) is int for row in answer["gpu_of_expert"] for gpu in row)


def test_a_small_one_by_hand(solver):
    """Experts 0 and 2 belong together, and 1 and 3: 10 of the 33 hops leave only when they are split up."""
    answer = solver.answer("affinity", GOOD)
    held_against_the_rules(answer, GOOD)
    assert (answer["status"], answer["node_hops"]) == ("OPTIMAL", 0)
    first, second = answer["gpu_of_expert"]
    assert answer["objective"] == answer["gpu_hops"] == 6
    assert first == second and first[0] == first[2] != first[1] == first[3]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("costs", [{}, {"cost_node": 9}, {"cost_gpu": 2, "cost_node": 3.5}, {"cost_gpu": 3}])
def test_nodes(solver, costs, staged):
    problem = {"transitions": permutation_affinity(4, 8, 400).tolist(), "gpus": 4, "gpus_per_node": 2} | costs
    answer = solver.answer("affinity", problem | {"staged": staged}, '{"time_limit": 3}')
    held_against_the_rules(answer, problem)
    assert answer["status"] == "OPTIMAL"


def test_a_larger_one_in_its_time_with_a_bound(solver):
    problem = {"transitions": permutation_affinity(6, 32, 4000).tolist(), "gpus": 8}
    answer = solver.answer("affinity", problem, '{"time_limit": 2, "seed": 3}')
    held_against_the_rules(answer, problem)
    assert 0.6 * answer["objective"] < answer["bound"]  # spectra alone give this; a fast machine proves more
    quick = solver.answer("affinity", problem, '{"time_limit": 0.5, "exact": false}')
    held_against_the_rules(quick, problem)
    assert solver.answer("affinity", [problem | {"gpus": 32}])[0]["status"] == "OPTIMAL"


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({"gpus": 2}, ["transitions"]),
        (GOOD | {"transitions": []}, ["transitions"]),
        (GOOD | {"transitions": [[]]}, ["transitions"]),
        (GOOD | {"transitions": [[[1, 2], [3]]]}, ["transitions", "layer 0", "2"]),
        (GOOD | {"transitions": [[[1, 2], [3, 4]], [[1]]]}, ["transitions", "layer 1"]),
        (GOOD | {"transitions": [[[1, -2], [3, 4]]]}, ["transitions", "at least 0"]),
        (GOOD | {"transitions": [[[1, "x"], [3, 4]]]}, ["transitions"]),
        (GOOD | {"gpus": 3}, ["4 experts", "3 GPUs", "1, 2, 4"]),
        (GOOD | {"gpus": 0}, ["gpus"]),
        (GOOD | {"gpus_per_node": 3}, ["gpus_per_node"]),
        (GOOD | {"cost_gpu": -1}, ["cost_gpu"]),
        (GOOD | {"cost_node": -1}, ["cost_node"]),
        (GOOD | {"staged": "perhaps"}, ["staged"]),
        (GOOD | {"speed": 1}, ["speed"]),
        ([GOOD, GOOD | {"gpus": 3}], ["instance 1"]),
    ],
)
def test_a_malformed_problem_is_one_line(solver, instance, parts):
    solver.refused("affinity", instance, *parts)
