"""Launches of four ranks in two nodes: two-tier orders, and plans that say how tokens travel."""

from collections.abc import Sequence

import numpy as np

from engine.cluster import Cluster, Node
from engine.communication.two_tier import two_tier
from engine.costs import Datasheet
from engine.launch.preparation.inference import prepare_inference
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.results.run import MeasuredPlan
from engine.network import Network
from engine.plan import Plan, SendOrder, Travel
from engine.problem import Problem
from engine.simulate.work import works_of
from tests.cases.launches import HOST, LAYERS, MODEL, plan_for, recording, sent
from tests.strategies import make_gpu

TRACE = recording()


def cluster_of(*nodes: tuple[int, float | None], port: float = 1e9) -> Cluster:
    """A cluster of nodes: number of GPUs and bytes/s of their links, None without links. port: bytes/s of every GPU"""
    gpu = make_gpu(send=port)
    drawn = [Node(name=f"node {at}", gpus=(gpu,) * size, link_bandwidth=link) for at, (size, link) in enumerate(nodes)]
    return Cluster(name="drawn", nodes=drawn)


TWO_NODES = cluster_of((2, 8e9), (2, 8e9))


def tiered(plan: Plan, cluster: Cluster = TWO_NODES) -> Plan:
    """The plan with a two-tier order for `TRACE` on a cluster."""
    traffic = TRACE.demand(plan.placement.gpus) @ plan.placement.share * MODEL.bytes_per_token
    schedules = [two_tier(matrix, Network.of(cluster)).solution for matrix in (*traffic, *traffic.transpose(0, 2, 1))]
    order = SendOrder(mode="two-tier", dispatch=schedules[:LAYERS], combine=schedules[LAYERS:])
    return plan.model_copy(update={"name": "two-tier", "send_order": order})


CONCURRENT = plan_for(TRACE, "concurrent")
TIERED = tiered(CONCURRENT)


def prepare(ranks: int = 4, cluster: Cluster | None = TWO_NODES, plan: Plan = TIERED, **more) -> PreparedLaunch:
    """A launch of `TRACE`. more: further plans (`others`), and options of `Launch`"""
    plans = (plan, *more.pop("others", ()))
    return prepare_inference(Launch(plans, TRACE, MODEL, cluster, ranks=ranks, **{"repeats": 2} | more), HOST)


WIDE = MODEL.model_copy(update={"d_model": 160})
"""A row of it has more than one group of 8-bit numbers, the last one not full."""
PADDED = recording(padding=0.1)


def travelling(
    plan: Plan, unit: str, dispatch: str | None = None, combine: str | None = None, replicas: str | None = None
) -> Plan:
    """The plan with a travel: rows per `unit`, and formats there and back."""
    travel = Travel(unit=unit, dispatch=dispatch, combine=combine, replicas=replicas)
    return Plan.model_validate(dict(plan) | {"travel": travel, "name": f"{plan.name} {travel.in_words}"})


def hold_bytes(launch: PreparedLaunch, runs: Sequence[MeasuredPlan], nodes: Cluster) -> None:
    """Assert that the bytes sent, measured and predicted, are those of `works_of` on the ranks. nodes: of the ranks"""
    instructions, second = launch.instructions, None
    if instructions.model_b is not None:
        second = Problem(launch.workloads[1], nodes, instructions.model_b, Datasheet())
    problem = Problem(launch.workloads[0], nodes, instructions.model, Datasheet(), second)
    for run, folded in zip(runs, instructions.plans, strict=True):
        for number, work in enumerate(works_of(folded, problem)):
            for kind in ("dispatch", "combine"):
                for layer, wanted in enumerate(getattr(work, kind)):
                    wanted = np.where(np.eye(instructions.ranks, dtype=bool), 0.0, wanted)
                    assert wanted.any()
                    measured, predicted = (
                        sent(timeline, kind, layer, instructions.ranks, number) for timeline in (run.measured, run.predicted)
                    )
                    np.testing.assert_array_equal(measured, wanted)
                    np.testing.assert_allclose(predicted, wanted, rtol=1e-9)


def prepared(*plans: Plan, cluster: Cluster | None = TWO_NODES, **more) -> PreparedLaunch:
    """A launch of `PADDED` with rows of `WIDE`. more: trace, model, and options of `Launch`"""
    trace, model = more.pop("trace", PADDED), more.pop("model", WIDE)
    return prepare_inference(Launch(plans, trace, model, cluster, **{"ranks": 4, "repeats": 1} | more), HOST)
