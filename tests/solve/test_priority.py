"""`solve priority`: JSON in, JSON out."""

import numpy as np
import pytest

from engine.simulate.priority import schedule_network
from tests.solve.test_solve import COMMON

PLAIN = {"alltoall": [[2, 3]], "allreduce": [[0, 5]]}


def test_by_hand(solver):
    answer = solver.answer("priority", PLAIN | {"micro_op": 2.5, "overhead": 0.5})
    assert set(answer) == COMMON | {"finish", "events"}
    assert (answer["status"], answer["objective"], answer["bound"], answer["finish"]) == ("FEASIBLE", 1, 0, 9)
    keys = ("kind", "index", "piece", "start", "end")
    rows = [("allreduce", 0, 0, 0, 3), ("alltoall", 0, 0, 3, 6), ("allreduce", 0, 1, 6, 9)]
    assert answer["events"] == [dict(zip(keys, row, strict=True)) for row in rows]


@pytest.mark.parametrize(("policy", "objective"), [("priority", 3), ("fair", 3), ("fifo", 3)])
def test_no_micro_op_is_uncut(solver, policy, objective):
    for more in ({}, {"micro_op": None}, {"micro_op": 5}, {"overhead": 0}):
        answer = solver.answer("priority", PLAIN | {"policy": policy} | more)
        assert (answer["objective"], answer["finish"], len(answer["events"])) == (objective, 8, 2)


@pytest.mark.parametrize("policy", ["priority", "fair", "fifo"])
def test_events_are_what_the_kernel_found(solver, policy):
    rng = np.random.default_rng(5)
    alltoall, allreduce = rng.random((4, 2)) * [9, 1], rng.random((5, 2)) * [9, 3]
    instance = {"alltoall": alltoall.tolist(), "allreduce": allreduce.tolist(), "micro_op": 0.4, "policy": policy}
    answer = solver.answer("priority", instance)
    result = schedule_network(alltoall, allreduce, 0.4, 0.0, policy)
    assert answer["objective"] == result.objective and answer["bound"] == result.bound
    starts = [event["start"] for event in answer["events"]]
    assert starts == sorted(starts) and answer["finish"] == max(event["end"] for event in answer["events"])
    waiting = 0.0
    for event in answer["events"]:
        assert type(event["index"]) is type(event["piece"]) is int
        if event["kind"] == "alltoall":
            waiting += event["end"] - alltoall[event["index"]].sum()
    assert waiting == pytest.approx(answer["objective"])
    for index in range(5):
        own = [event["piece"] for event in answer["events"] if (event["kind"], event["index"]) == ("allreduce", index)]
        assert own == list(range(int(np.ceil(allreduce[index, 1] / 0.4))))


def test_nothing_to_do_and_arrays(solver):
    empty = {"alltoall": [], "allreduce": []}
    answers = solver.answer("priority", [empty, PLAIN])
    assert [answer["finish"] for answer in answers] == [0, 8]
    assert (answers[0]["status"], answers[0]["objective"], answers[0]["events"]) == ("OPTIMAL", 0, [])


@pytest.mark.parametrize(
    ("instance", "parts"),
    [
        ({}, ["alltoall"]),
        (PLAIN | {"alltoall": [[1]]}, ["alltoall → 0"]),
        (PLAIN | {"alltoall": [[1, 2, 3]]}, ["alltoall → 0"]),
        (PLAIN | {"allreduce": [[0, -1]]}, ["allreduce", "at least 0"]),
        ('{"alltoall": [[0, NaN]], "allreduce": []}', ["alltoall"]),
        (PLAIN | {"micro_op": 0}, ["micro_op"]),
        (PLAIN | {"micro_op": 1e-8}, ["micro_op", "pieces"]),
        (PLAIN | {"overhead": -1}, ["overhead"]),
        (PLAIN | {"policy": "fixed"}, ["policy"]),
        (PLAIN | {"weight": 1}, ["weight"]),
        ([PLAIN, PLAIN | {"overhead": "x"}], ["instance 1", "overhead"]),
    ],
)
def test_malformed_instances_are_one_line(solver, instance, parts):
    solver.refused("priority", instance, *parts)
