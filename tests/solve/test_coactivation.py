"""`solve coactivation`: JSON in, JSON out, every answer held against the rules of its problem."""

import numpy as np
import pytest

from engine.validate.coactivation import check_coactivation
from tests.placement.coactivation_cases import random_tokens, topic_tokens

KEYS = {"status", "objective", "bound", "runtime", "gpu_of_expert", "rows", "imbalance"}
GOOD = {"experts": [[[0, 2], [1, 3], [2, 0], [1, 3], [0, -1]]], "source_gpu": [0, 0, 1, 1, 0], "gpus": 2}


def held_against_the_rules(answer: dict, problem: dict) -> None:
    assert set(answer) == KEYS
    rows, imbalance = check_coactivation(
        np.array(answer["gpu_of_expert"]),
        np.array(problem["experts"]),
        np.array(problem["source_gpu"]),
        problem["gpus"],
        problem.get("gpus_per_node"),
        problem.get("travel", "gpu"),
        problem.get("cap") if answer["status"] in ("OPTIMAL", "FEASIBLE") else None,
    )
    assert (answer["rows"], answer["objective"]) == (rows, sum(rows))
    assert answer["imbalance"] == pytest.approx(imbalance)
    assert answer["bound"] <= answer["objective"]
    assert all(type(value) is int for row in (answer["rows"], *answer["gpu_of_expert"]) for value in row)


def test_a_small_one_by_hand(solver):
    """Experts 0 and 2 fire together, and 1 and 3: only tokens that are not at home send a row, two of five."""
    answer = solver.answer("coactivation", GOOD)
    held_against_the_rules(answer, GOOD)
    assert (answer["status"], answer["objective"], answer["rows"]) == ("OPTIMAL", 2, [2])
    assert answer["gpu_of_expert"] == [[0, 1, 0, 1]]


@pytest.mark.parametrize("more", [{}, {"cap": 1.5}, {"gpus_per_node": 2, "travel": "node"}, {"expert_count": 16}])
def test_several_layers(solver, more):
    experts = random_tokens(3, 30, 8, 3, 0, missing=0.05).tolist()
    problem = {"experts": experts, "source_gpu": [token % 4 for token in range(30)], "gpus": 4} | more
    answer = solver.answer("coactivation", problem, '{"time_limit": 30}')
    held_against_the_rules(answer, problem)
    assert answer["status"] == "OPTIMAL"
    assert len(answer["gpu_of_expert"][0]) == more.get("expert_count", 8)


def test_a_larger_one_in_its_time_with_a_bound(solver):
    experts = topic_tokens(1500, 64, 6, topics=20)[None].tolist()
    problem = {"experts": experts, "source_gpu": [token % 8 for token in range(1500)], "gpus": 8, "cap": 1.2}
    answer = solver.answer("coactivation", problem, '{"time_limit": 30, "seed": 3}')
    held_against_the_rules(answer, problem)
    assert 0.5 * answer["objective"] < answer["bound"]
    quick = solver.answer("coactivation", problem, '{"time_limit": 2, "exact": false}')
    held_against_the_rules(quick, problem)


def test_a_cap_that_no_placement_keeps(solver):
    """Expert 0 has three quarters of all tokens, so its GPU has at least 1.5 times the mean."""
    problem = GOOD | {"experts": [[[0, 1], [0, 2], [0, 3], [0, -1], [0, -1]]], "cap": 1.2}
    answer = solver.answer("coactivation", problem)
    held_against_the_rules(answer, problem)
    assert (answer["status"], answer["imbalance"]) == ("INFEASIBLE", [1.5])


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({"experts": GOOD["experts"], "gpus": 2}, ["source_gpu"]),
        (GOOD | {"experts": []}, ["experts"]),
        (GOOD | {"experts": [[]]}, ["layer 0", "0 tokens", "5"]),
        (GOOD | {"experts": [[[0], [1], [2, 3], [1], [0]]]}, ["experts"]),
        (GOOD | {"experts": [[[0], [1], [2], [1], [-2]]]}, ["experts", "-2"]),
        (GOOD | {"experts": [[[0], [1], [2], [1], [10**30]]]}, ["experts"]),
        (GOOD | {"experts": [[["x"]]]}, ["experts"]),
        (GOOD | {"source_gpu": [0, 0, 1, 1, 2]}, ["source_gpu", "0 to 1", "2"]),
        (GOOD | {"gpus": 0}, ["gpus"]),
        (GOOD | {"gpus_per_node": 3}, ["gpus_per_node"]),
        (GOOD | {"travel": "copies"}, ["travel"]),
        (GOOD | {"cap": 0.5}, ["cap", "at least 1"]),
        (GOOD | {"expert_count": 5}, ["5 experts"]),
        (GOOD | {"speed": 1}, ["speed"]),
        ([GOOD, GOOD | {"cap": 0}], ["instance 1"]),
    ],
)
def test_a_malformed_problem_is_one_line(solver, instance, parts):
    solver.refused("coactivation", instance, *parts)
