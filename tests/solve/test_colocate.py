"""`solve colocate` and `solve colocate-heterogeneous`: JSON in, JSON out, answers held against the rules."""

from itertools import permutations

import numpy as np
import pytest

from engine.validate import check_colocation, check_colocation_heterogeneous
from tests.solve.test_solve import COMMON

NAMES = ("send_a", "recv_a", "send_b", "recv_b")
PAIRS = {name: [1, 2] for name in NAMES}
TRIPLES = {"cost": [[[1, 2], [3, 4]], [[4, 3], [2, 1]]]}


def pairs_of(rng: np.random.Generator, experts: int) -> dict:
    return {name: rng.integers(0, 50, experts).tolist() for name in NAMES}


@pytest.mark.parametrize("experts", [1, 2, 5])
def test_colocate(solver, experts):
    instance = pairs_of(np.random.default_rng(experts), experts)
    answer = solver.answer("colocate", instance)
    assert set(answer) == COMMON | {"partner"} and answer["status"] == "OPTIMAL"
    assert all(type(expert) is int for expert in answer["partner"])
    four = [np.array(instance[name]) for name in NAMES]
    best = min(check_colocation(np.array(permutation), *four) for permutation in permutations(range(experts)))
    assert check_colocation(np.array(answer["partner"]), *four) == answer["objective"] == answer["bound"] == best


def test_colocate_by_hand(solver):
    # Expert 0 of a sends much and receives little: beside the expert of b that does the opposite.
    answer = solver.answer("colocate", {"send_a": [9, 1], "recv_a": [1, 9], "send_b": [8, 2], "recv_b": [2, 8]})
    assert (answer["partner"], answer["objective"]) == ([1, 0], 11)


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("options", ["{}", '{"exact": false}', '{"time_limit": 5, "seed": 3}'])
def test_colocate_heterogeneous(solver, gpus, options):
    cost = np.random.default_rng(gpus).integers(0, 40, (gpus, gpus, gpus))
    answer = solver.answer("colocate-heterogeneous", {"cost": cost.tolist()}, options)
    assert set(answer) == COMMON | {"assignment"}
    assert [row[0] for row in answer["assignment"]] == list(range(gpus))
    assert all(type(number) is int for row in answer["assignment"] for number in row)
    assert check_colocation_heterogeneous(np.array(answer["assignment"])[:, 1:], cost) == answer["objective"]
    every = list(permutations(range(gpus)))
    best = min(max(cost[range(gpus), a, b]) for a in every for b in every)
    assert answer["bound"] <= best <= answer["objective"]
    if "exact" not in options:
        assert answer["status"] == "OPTIMAL" and answer["objective"] == answer["bound"] == best


def test_a_time_limit_keeps_a_legal_answer_and_says_so(solver):
    rng = np.random.default_rng(3)
    four = {name: rng.random(60).tolist() for name in NAMES}
    answer = solver.answer("colocate", four, '{"time_limit": 1e-9}')
    worth = check_colocation(np.array(answer["partner"]), *(np.array(four[name]) for name in NAMES))
    assert answer["status"] == "TIME_LIMIT" and answer["bound"] <= worth == answer["objective"]
    cost = rng.random((9, 9, 9))
    answer = solver.answer("colocate-heterogeneous", {"cost": cost.tolist()}, '{"time_limit": 1e-9}')
    worth = check_colocation_heterogeneous(np.array(answer["assignment"])[:, 1:], cost)
    assert answer["status"] == "TIME_LIMIT" and answer["bound"] <= worth == answer["objective"]


def test_an_array_of_instances(solver):
    answers = solver.answer("colocate", [PAIRS, pairs_of(np.random.default_rng(0), 3)])
    assert [len(answer["partner"]) for answer in answers] == [2, 3]


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({name: PAIRS[name] for name in NAMES[:3]}, ["recv_b"]),
        (PAIRS | {"send_b": [1]}, ["send_b", "2", "1"]),
        ({name: [] for name in NAMES}, ["send_a"]),
        (PAIRS | {"recv_a": [1, -1]}, ["recv_a"]),
        (PAIRS | {"recv_a": [1, "x"]}, ["recv_a"]),
        (PAIRS | {"recv_a": [[1], [2]]}, ["recv_a"]),
        (PAIRS | {"recv_a": 3}, ["recv_a"]),
        (PAIRS | {"cost": 3}, ["cost"]),
        ([PAIRS, PAIRS | {"send_a": [1, 2, 3]}], ["instance 1", "send_a"]),
        ("7", ["colocate"]),
    ],
)
def test_malformed_pairs_are_one_line(solver, instance, parts):
    solver.refused("colocate", instance, *parts)


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({}, ["cost"]),
        ({"cost": []}, ["cost"]),
        ({"cost": [[]]}, ["cost of GPU 0"]),
        ({"cost": [[[]]]}, ["cost of GPU 0"]),
        ({"cost": [[1, 2], [3, 4]]}, ["cost"]),
        ({"cost": TRIPLES["cost"][:1]}, ["cost of GPU 0", "1 GPU"]),
        ({"cost": [[[1, 2], [3]], [[1, 2], [3, 4]]]}, ["cost of GPU 0"]),
        ({"cost": [[[1, 2], [3, 4]], [[1, 2, 3], [4, 5, 6]]]}, ["cost of GPU 1"]),
        ('{"cost": [[[NaN]]]}', ["cost"]),
        (TRIPLES | {"gpus": 2}, ["gpus"]),
        ([TRIPLES, {"cost": [[[1, 2]]]}], ["instance 1", "cost"]),
    ],
)
def test_malformed_costs_are_one_line(solver, instance, parts):
    solver.refused("colocate-heterogeneous", instance, *parts)
