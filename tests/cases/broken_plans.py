"""The sample's plans, each broken in one way, as the JSON of a file that somebody sends."""

import json
from functools import cache

from engine.costs import Datasheet
from engine.formats import read_cluster, read_model, read_workload
from engine.problem import Problem, make_problem
from engine.systems import SYSTEMS, run
from tests.cases.cli import CLUSTER, MODEL, RECORDING

LAYER = 3


def problem() -> Problem:
    """The problem of the plans: the first sample."""
    model = read_model(MODEL)
    workload = read_workload(RECORDING, num_experts=model.experts, bytes_per_token=model.bytes_per_token)
    return make_problem(workload, read_cluster(CLUSTER), model, Datasheet())


@cache
def _legal(system: str) -> str:
    options = {"order": "matched", "time_limit": 0.3}
    return run(SYSTEMS[system], problem(), options).result.solution.to_json()


def legal(system: str = "aurora") -> dict:
    """A plan with a matched order, as JSON; of eplb one with replicas."""
    return json.loads(_legal(system))


def missing_expert() -> dict:
    plan = legal()
    for slots in plan["placement"]["experts_of_gpu"][LAYER]:
        if 5 in slots:
            slots.remove(5)
    return plan


def shares() -> dict:
    """One replica's tokens go to a GPU that serves others."""
    plan = legal("eplb")
    placement = plan["placement"]
    copies = [sum(map(len, row)) for row in placement["experts_of_gpu"]]
    layer = next(layer for layer, count in enumerate(copies) if count > placement["experts"])
    sends = plan["send_order"]["dispatch"][layer]
    sends["bytes"][0] /= 2
    return plan


def no_matching() -> dict:
    """All sends of a layer at once."""
    plan = legal()
    sends = plan["send_order"]["dispatch"][LAYER]
    sends["phase"] = [0] * len(sends["phase"])
    return plan


def other_bytes() -> dict:
    plan = legal()
    sends = plan["send_order"]["combine"][LAYER]
    sends["bytes"][0] *= 0.75
    return plan


BROKEN = {
    "missing expert": (missing_expert, rf"layer {LAYER}: expert 5 is on no GPU"),
    "shares": (
        shares,
        r"layer \d, dispatch: GPU \d sends [\d.]+ bytes to GPU \d instead of [\d.]+; replicas take equal shares of their "
        r"expert's tokens",
    ),
    "no matching": (
        no_matching,
        rf"layer {LAYER}, dispatch: phase 0: GPU \d (sends to|receives from) GPU \d and GPU \d at once, which is no matching",
    ),
    "other bytes": (other_bytes, rf"layer {LAYER}, combine: GPU \d sends [\d.]+ bytes to GPU \d instead of [\d.]+"),
}
"""Fault -> (the plan as JSON, a pattern of the refusal after the name of the plan or its file)."""
