"""`solve replicate`: JSON in, JSON out, held against the rules of the problem."""

import numpy as np
import pytest

from engine.validate.replication import check_replication

LOAD = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
INSTANCE = {"load": LOAD, "slots": 16, "gpus": 8}


def held_against_the_rules(answer: dict, instance: dict) -> np.ndarray:
    assert set(answer) == {"status", "objective", "bound", "runtime", "physical_to_logical", "balancedness"}
    loads = np.array(instance.get("loads") or [instance["load"]], dtype=float)
    balance = check_replication(
        np.array(answer["physical_to_logical"]),
        loads,
        instance["gpus"],
        instance.get("slots_of_gpu"),
        instance.get("split", "equal"),
        instance.get("speed"),
    )
    assert np.array(answer["balancedness"]) == pytest.approx(balance, rel=1e-6)
    assert answer["objective"] == pytest.approx(balance.min(), rel=1e-6)
    assert answer["objective"] <= answer["bound"] <= 1
    assert all(type(expert) is int for row in answer["physical_to_logical"] for expert in row)
    return balance


@pytest.mark.parametrize("split", ["equal", "free"])
@pytest.mark.parametrize("several", [False, True])
def test_one_and_several_loads(solver, split, several):
    instance = INSTANCE | {"split": split}
    if several:
        instance = {"loads": [LOAD, LOAD[::-1]], "slots": 16, "gpus": 8, "split": split}
    answer = solver.answer("replicate", instance, '{"exact": false}')
    usual = solver.answer("replicate", instance | {"algorithm": "eplb"})
    assert held_against_the_rules(answer, instance).shape == (2 if several else 1, 2)
    held_against_the_rules(usual, instance)
    assert answer["objective"] >= usual["objective"] * (1 - 1e-6)


def test_the_published_example(solver):
    answer = solver.answer("replicate", INSTANCE | {"algorithm": "eplb", "nodes": 2, "groups": 4})
    assert answer["physical_to_logical"][0] == [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]
    assert answer["balancedness"] == [pytest.approx([0.828, 0.805], abs=5e-4)]


def test_gpus_of_different_size_and_speed(solver):
    instance = {"load": [[4, 3, 2, 1, 1, 1]], "slots": 8, "gpus": 3, "slots_of_gpu": [4, 2, 2], "speed": [2, 1, 1]}
    held_against_the_rules(solver.answer("replicate", instance), instance)


def test_a_proven_answer(solver):
    instance = {"load": [[2, 1, 1]], "slots": 4, "gpus": 2}
    answer = solver.answer("replicate", instance)
    held_against_the_rules(answer, instance)
    assert (answer["status"], answer["objective"], answer["bound"]) == ("OPTIMAL", 1.0, 1.0)


def test_a_time_limit_keeps_a_legal_answer_and_says_so(solver):
    answer = solver.answer("replicate", INSTANCE, '{"time_limit": 1e-9}')
    held_against_the_rules(answer, INSTANCE)
    assert answer["status"] == "TIME_LIMIT"


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({"slots": 16, "gpus": 8}, ["load", "loads"]),
        (INSTANCE | {"loads": [LOAD]}, ["either load"]),
        (INSTANCE | {"load": [[1, 2], [3]]}, ["load", "equal length"]),
        ({"loads": [[[1, 2]], [[1, 2, 3]]], "slots": 4, "gpus": 2}, ["loads", "same layers"]),
        ({"loads": [], "slots": 4, "gpus": 2}, ["loads"]),
        (INSTANCE | {"load": [[1, -2] * 6]}, ["loads", "at least 0"]),
        (INSTANCE | {"slots": 8}, ["8 slots for 12 experts"]),
        (INSTANCE | {"slots": 17}, ["16 or 24"]),
        (INSTANCE | {"gpus": 0}, ["gpus"]),
        (INSTANCE | {"slots": 10**30}, ["slots"]),
        (INSTANCE | {"split": "half"}, ["split"]),
        (INSTANCE | {"algorithm": "greedy"}, ["algorithm"]),
        (INSTANCE | {"nodes": 3}, ["nodes"]),
        (INSTANCE | {"groups": 5}, ["groups"]),
        (INSTANCE | {"slots_of_gpu": [2, 2]}, ["slots_of_gpu", "8 GPUs"]),
        (INSTANCE | {"slots_of_gpu": [10**30] * 8}, ["slots_of_gpu"]),
        (INSTANCE | {"speed": [1] * 7 + [0]}, ["speed"]),
        (INSTANCE | {"memory": 3}, ["memory"]),
        ([INSTANCE | {"algorithm": "eplb"}, INSTANCE | {"slots": 9}], ["instance 1", "take 16"]),
    ],
)
def test_malformed_instances_are_one_line(solver, instance, parts):
    solver.refused("replicate", instance, *parts)
