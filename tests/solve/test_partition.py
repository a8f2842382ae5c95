"""`solve partition` and `solve partition-axes`, every answer held against the rules of its problem."""

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.validate import IllegalError, check_axes, check_partition
from tests.cases.examples import examples

COMMON = {"status", "objective", "bound", "runtime"}
CHAIN = {
    "ops": [
        {"kind": "comp", "times": [2, 1]},
        {"kind": "comm", "times": [4, 2.25]},
        {"kind": "comp", "times": [2, 1.5]},
        {"kind": "comp", "times": [1, None]},
    ]
}
AXES = {
    "domains": {"x": [0, -1], "w": [-1, 1], "y": [0, 1], "z": [0, 1]},
    "constraints": [
        {"tensors": ["x", "w", "y"], "allowed": [[0, -1, 0], [-1, 1, 1]]},
        {"tensors": ["y", "z"], "allowed": [[0, 0], [1, 1]]},
    ],
}

fixed = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def held_against_the_rules(answer: dict, instance: dict) -> None:
    assert set(answer) == COMMON | {"ranges"}
    for part_range in answer["ranges"]:
        assert set(part_range) == {"first", "last", "parts"} and all(
            type(number) is int for number in part_range.values()
        )
    ranges = [(part_range["first"], part_range["last"], part_range["parts"]) for part_range in answer["ranges"]]
    times = [[np.inf if seconds is None else seconds for seconds in op["times"]] for op in instance["ops"]]
    network = [op["kind"] == "comm" for op in instance["ops"]]
    worth = check_partition(ranges, network, times, max_range=instance.get("max_range"))
    assert answer["objective"] == pytest.approx(worth, rel=1e-9)
    assert answer["bound"] <= answer["objective"]


def test_partition(solver):
    answer = solver.answer("partition", CHAIN)
    held_against_the_rules(answer, CHAIN)
    # The first part's 1, the network's 4.5, the last part's 1.5; the operator that cannot be cut comes behind.
    assert answer["objective"] == answer["bound"] == 8 and answer["status"] == "OPTIMAL"
    assert answer["ranges"] == [{"first": 0, "last": 2, "parts": 2}, {"first": 3, "last": 3, "parts": 1}]


def test_a_limit_on_ranges_keeps_the_bound_of_all_ranges(solver):
    limited = CHAIN | {"max_range": 2}
    answer = solver.answer("partition", limited)
    held_against_the_rules(answer, limited)
    # The first part's 1 and the network's 4.5; then 2 and 1, uncut.
    assert answer["objective"] == 8.5 and answer["bound"] == 8 and answer["status"] == "FEASIBLE"


@fixed
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)))
def test_any_chain_is_partitioned_by_the_rules(solver, seed, ops, parts, max_range):
    rng = np.random.default_rng(seed)
    times = rng.random((ops, 1)) / np.arange(1, parts + 1) + 0.01
    kinds = rng.choice(["comp", "comm"], ops).tolist()
    instance = {"ops": [{"kind": kind, "times": row} for kind, row in zip(kinds, times.tolist(), strict=True)]}
    instance |= {"max_range": max_range} if max_range else {}
    held_against_the_rules(solver.answer("partition", instance), instance)


def test_a_time_limit_leaves_the_rest_of_the_chain_uncut(solver):
    instance = {"ops": CHAIN["ops"][:3] * 50}
    answer = solver.answer("partition", instance, '{"time_limit": 1e-9}')
    held_against_the_rules(answer, instance)
    assert answer["status"] == "TIME_LIMIT" and answer["bound"] < answer["objective"] == 8 * 50


def solutions(instance: dict) -> int:
    rules = [(constraint["tensors"], constraint["allowed"]) for constraint in instance["constraints"]]
    count = 0
    for chosen in product(*instance["domains"].values()):
        try:
            check_axes(dict(zip(instance["domains"], chosen, strict=True)), instance["domains"], rules)
            count += 1
        except IllegalError:
            continue
    return count


def test_partition_axes(solver):
    answer = solver.answer("partition-axes", AXES)
    assert set(answer) == COMMON | {"satisfiable", "axis_of_tensor"}
    assert answer["satisfiable"] is True and answer["status"] == "OPTIMAL"
    check_axes(answer["axis_of_tensor"], AXES["domains"], [(c["tensors"], c["allowed"]) for c in AXES["constraints"]])
    counted = solver.answer("partition-axes", AXES | {"count": True})
    assert counted["solutions"] == solutions(AXES) == 2 and counted["axis_of_tensor"] == answer["axis_of_tensor"]


def test_unsatisfiable_axes(solver):
    instance = AXES | {"constraints": [*AXES["constraints"], {"tensors": ["x", "z"], "allowed": [[0, 1]]}]}
    code, answer, _ = solver("partition-axes", instance | {"count": True})
    assert code in (0, 3)
    assert answer["status"] == "INFEASIBLE" and answer["satisfiable"] is False and answer["axis_of_tensor"] is None
    assert answer["solutions"] == solutions(instance) == 0
    assert answer["objective"] == answer["bound"] == 0


def test_names_and_numbers_are_different_axes(solver):
    instance = {"domains": {"x": [0, "0"]}, "constraints": [{"tensors": ["x"], "allowed": [["0"]]}], "count": True}
    answer = solver.answer("partition-axes", instance)
    assert answer["axis_of_tensor"] == {"x": "0"} and answer["solutions"] == 1


def test_a_time_limit_leaves_the_question_open(solver):
    answer = solver.answer("partition-axes", AXES | {"count": True}, '{"time_limit": 1e-9}')
    assert answer["status"] == "TIME_LIMIT" and answer["solutions"] is None


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({"ops": []}, ["ops"]),
        ({"ops": [{"kind": "comp", "times": []}]}, ["times"]),
        ({"ops": [{"kind": "compute", "times": [1]}]}, ["kind"]),
        ({"ops": [{"kind": "comp", "times": [1, 2]}, {"kind": "comm", "times": [1]}]}, ["operator 1 has 1 times"]),
        ({"ops": [{"kind": "comp", "times": [-1]}]}, ["at least 0"]),
        ({"ops": [{"kind": "comp", "times": [None, 1]}]}, ["one part"]),
        ({"ops": [{"kind": "comp", "times": ["x"]}]}, ["times"]),
        ('{"ops": [{"kind": "comp", "times": [NaN]}]}', ["times"]),
        ({"ops": [{"kind": "comp", "times": [1e308, 1e308]}]}, ["too large"]),
        (CHAIN | {"max_range": 0}, ["max_range"]),
        (CHAIN | {"streams": 2}, ["streams"]),
        ([CHAIN, CHAIN | {"max_range": -1}], ["instance 1"]),
    ],
)
def test_a_malformed_chain_is_one_line(solver, instance, parts):
    solver.refused("partition", instance, *parts)


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({"constraints": []}, ["domains"]),
        ({"domains": {"x": [0.5]}}, ["domains"]),
        ({"domains": {"x": [True]}}, ["domains"]),
        ({"domains": {"x": [0]}, "constraints": [{"tensors": ["y"], "allowed": []}]}, ["constraint 0", "'y'"]),
        ({"domains": {"x": [0]}, "constraints": [{"tensors": [], "allowed": []}]}, ["constraint 0", "no tensor"]),
        ({"domains": {"x": [0]}, "constraints": [{"tensors": ["x"], "allowed": [[0, 1]]}]}, ["2 axes for 1"]),
        (AXES | {"count": "many"}, ["count"]),
    ],
)
def test_malformed_axes_are_one_line(solver, instance, parts):
    solver.refused("partition-axes", instance, *parts)
