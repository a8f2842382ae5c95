"""`solve pipeline-degree`: JSON in, JSON out, answers held against a walk over the parts."""

import numpy as np
import pytest

from engine.validate import check_pipeline

COMMON = {"status", "objective", "bound", "runtime"}
LAYER = {
    "alpha_comm": 2e-4,
    "beta_comm": 3.5e-10,
    "size_comm": 4e7,
    "alpha_comp": 1.2e-4,
    "beta_comp": 8e-14,
    "size_comp": 1.6e11,
    "max_degree": 24,
}
EXTRAS = [{}, {"streams": 1}, {"streams": 2}, {"order": "interleaved"}, {"streams": 1, "order": "dispatch-first"}]


def walked(instance: dict) -> list[float]:
    every = []
    for parts in range(1, instance["max_degree"] + 1):
        comm = [instance["alpha_comm"] + instance["beta_comm"] * instance["size_comm"] / parts] * parts
        comp = [instance["alpha_comp"] + instance["beta_comp"] * instance["size_comp"] / parts] * parts
        order = instance.get("order", "dispatch-first")
        every.append(check_pipeline(comm, comp, comm, instance.get("streams", 1), order))
    return every


@pytest.mark.parametrize("extra", EXTRAS)
def test_pipeline_degree(solver, extra):
    answer = solver.answer("pipeline-degree", LAYER | extra)
    every = walked(LAYER | extra)
    assert set(answer) == COMMON | {"degree", "time_of_degree"} and answer["status"] == "OPTIMAL"
    assert answer["time_of_degree"] == pytest.approx(every, rel=1e-12)
    assert type(answer["degree"]) is int and answer["degree"] == int(np.argmin(every)) + 1 > 1
    assert answer["objective"] == answer["bound"] == answer["time_of_degree"][answer["degree"] - 1]


def test_the_ways_differ(solver):
    answers = [solver.answer("pipeline-degree", LAYER | extra) for extra in EXTRAS]
    assert answers[0]["time_of_degree"] == answers[1]["time_of_degree"] == answers[4]["time_of_degree"]
    assert answers[2]["objective"] < answers[0]["objective"] <= answers[3]["objective"]
    # Sends of 2 and experts of 3 seconds a part. In three parts D3 before C1: the experts never wait, 2 + 9 + 2; after it:
    # D1 0-2, D2 2-4, C1 5-7, D3 7-9, C2 9-11, E3 9-12, C3 12-14. One or two parts leave no choice of order.
    steady = {"alpha_comm": 2, "beta_comm": 0, "size_comm": 1, "alpha_comp": 3, "beta_comp": 0, "size_comp": 1}
    for extra, wanted in ((EXTRAS[0], [7, 10, 13]), (EXTRAS[3], [7, 10, 14])):
        assert solver.answer("pipeline-degree", steady | extra | {"max_degree": 3})["time_of_degree"] == wanted


def test_the_smallest_of_ties(solver):
    # The network is never idle from two parts on: 2 · 3 seconds at every degree.
    coefficients = {"alpha_comm": 0, "beta_comm": 1, "size_comm": 3, "alpha_comp": 0, "beta_comp": 1, "size_comp": 3}
    answer = solver.answer("pipeline-degree", coefficients | {"max_degree": 9})
    assert (answer["degree"], answer["objective"]) == (2, 6.0)


def test_the_printed_rule_says_what_it_loses(solver):
    coefficients = {
        "alpha_comm": 0.01,
        "beta_comm": 1,
        "size_comm": 4,
        "alpha_comp": 0.02,
        "beta_comp": 1,
        "size_comp": 9,
    }
    exact = solver.answer("pipeline-degree", coefficients | {"max_degree": 64})
    printed = solver.answer("pipeline-degree", coefficients | {"max_degree": 64, "algorithm": "printed"})
    assert (printed["status"], printed["degree"], exact["degree"]) == ("FEASIBLE", 2, 20)
    assert printed["bound"] == exact["objective"] < printed["objective"] == printed["time_of_degree"][1]


def test_an_array_of_instances_and_no_time_at_all(solver):
    answers = solver.answer("pipeline-degree", [LAYER, LAYER | {"max_degree": 1}])
    assert [len(answer["time_of_degree"]) for answer in answers] == [24, 1]
    assert answers[1]["degree"] == 1
    hurried = solver.answer("pipeline-degree", LAYER, '{"time_limit": 1e-9}')
    assert hurried["status"] == "TIME_LIMIT" and hurried["degree"] == 1
    assert hurried["bound"] < answers[0]["objective"] < hurried["objective"]


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({name: value for name, value in LAYER.items() if name != "size_comp"}, ["size_comp"]),
        (LAYER | {"alpha_comm": -1}, ["alpha_comm"]),
        (LAYER | {"beta_comp": "fast"}, ["beta_comp"]),
        (LAYER | {"size_comm": [1, 2]}, ["size_comm"]),
        (LAYER | {"max_degree": 0}, ["max_degree"]),
        (LAYER | {"max_degree": 100_001}, ["max_degree"]),
        (LAYER | {"max_degree": 2.5}, ["max_degree"]),
        (LAYER | {"streams": 3}, ["streams"]),
        (LAYER | {"order": "random"}, ["order"]),
        (LAYER | {"streams": 2, "order": "interleaved"}, ["set streams to 1"]),
        (LAYER | {"algorithm": "slow"}, ["algorithm"]),
        (LAYER | {"gpus": 2}, ["gpus"]),
        (LAYER | {"beta_comm": 1e300, "size_comm": 1e300}, ["too large"]),
        ([LAYER, LAYER | {"alpha_comp": 1e308}], ["instance 1", "too large"]),
        ("7", ["pipeline-degree"]),
    ],
)
def test_malformed_instances_are_one_line(solver, instance, parts):
    solver.refused("pipeline-degree", instance, *parts)
